"""A plan as one self-contained HTML page: figures, tables, environment with reasons, driver command.

Pure text out of a plan: no file, no script, nothing that a browser would fetch.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from html import escape

from miles_hpc.plan.figures import memory_figure, node_figure
from miles_hpc.plan.phases import Phase
from miles_hpc.plan.placement import group_spans
from miles_hpc.plan.plan import Plan

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2024; --faint: #5b6670; --line: #d3d9de;
  --error: #b00020; --warning: #8a4b00 }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --ink: #e4e8eb; --faint: #9aa5ae; --line: #3a4147;
  --error: #ff8a94; --warning: #f0b060 } }
html { background: var(--ground); color: var(--ink) }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; overflow-wrap: anywhere }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; padding-bottom: 4px; border-bottom: 1px solid var(--line) }
h3 { font-size: 1em } li { margin: 4px 0 } .error { color: var(--error) } .warning { color: var(--warning) }
.scroll { overflow-x: auto } svg { display: block; font-size: 12px } line.limit { stroke: var(--error) }
text.limit { fill: var(--error) } line.alarm { stroke: var(--warning) } text.alarm { fill: var(--warning) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px 16px; margin: 0 }
dt { color: var(--faint); font-size: 0.9em } dd { margin: 0; font-size: 1.1em; font-variant-numeric: tabular-nums }
ul { padding-left: 1.3em } table { border-collapse: collapse; overflow-wrap: normal } .wide td { overflow-wrap: anywhere } th, td { text-align: left; vertical-align: top; padding: 4px 16px 4px 0 }
th { border-bottom: 1px solid var(--line); color: var(--faint); font-weight: 600 } tbody tr + tr td { border-top: 1px solid var(--line) }
.wide td:nth-child(1), .wide td:nth-child(2) { font-family: ui-monospace, monospace; font-size: 0.9em }
.wide { table-layout: fixed; width: 100% } .wide th:nth-child(1) { width: 27% } .wide th:nth-child(2) { width: 18% }
.wide th:nth-child(4) { width: 22% } .wide td:nth-child(4) { color: var(--faint) }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
@media (max-width: 700px) { th, td { padding-right: 10px } .wide, .wide tbody, .wide tr, .wide td { display: block; padding: 0 } .wide thead { display: none }
  .wide tr { padding: 8px 0; border-top: 1px solid var(--line) } .wide tbody tr + tr td { border-top: 0 } }
"""
_PLACES = (
    ("host", "Host memory of a node"),
    ("gpu", "Memory of a GPU"),
    ("scratch", "Scratch disk of a node"),
)


def render_page(plan: Plan, would_fit: Sequence[str] = ()) -> str:
    """Return the page of `plan`.

    Args:
        plan: the plan, refused or not.
        would_fit: changes that make a refused plan pass.
    """
    head = (
        f"<h1>{escape(plan.name)}</h1><p>Engine {escape(plan.engine)}, {plan.layout.world_size} ranks on"
        f" {plan.layout.num_nodes} nodes, {plan.rollout.num_engines} rollout engines."
        f" Planned by miles-hpc {escape(plan.package_version)}.</p>"
    )
    sections = [
        head,
        _findings(plan, would_fit),
        "<h2>Memory by phase</h2>",
        *_memory(plan, plan.memory.phases, "the trainer" if plan.memory.rollout_phases else ""),
        *_memory(plan, plan.memory.rollout_phases, "rollout"),
        "<h2>Nodes</h2>",
        _scroll(node_figure(plan.layout, plan.rollout)),
        "<h2>Layout</h2>",
        _facts([*asdict(plan.layout).items(), *asdict(plan.rollout).items()]),
        "<h2>Communication groups</h2>",
        _table(
            ("axis", "ranks in a group", "groups", "nodes of a group", "crosses nodes"),
            [
                (
                    span.axis,
                    span.size,
                    span.num_groups,
                    span.nodes_per_group,
                    "yes" if span.crosses_nodes else "no",
                )
                for span in group_spans(plan.layout, plan.rollout)
                if span.size > 1
            ],
        ),
        "<h2>Environment</h2>",
        _table(
            ("variable", "value", "why", "source"),
            [(v.name, v.value, v.why, v.source) for v in plan.environment],
            kind="wide",
        ),
        "<h2>Driver</h2>",
        f"<pre>{escape(shlex.join(plan.driver_argv))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(plan.name)}: plan</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _memory(plan: Plan, phases: Sequence[Phase], kind: str) -> Iterator[str]:
    """Yield the figures of `phases` under their titles; `kind` says whose nodes they are where there are two kinds."""
    for place, title in _PLACES if phases else ():
        figure = memory_figure(plan.memory, place, phases)
        if figure:
            yield f"<h3>{title}{f' of {kind}' if kind else ''}</h3>{_scroll(figure)}"


def _scroll(figure: str) -> str:
    """Return the figure at its own size: a narrow window scrolls it, so that its words stay readable."""
    return f'<div class="scroll" tabindex="0">{figure}</div>'


def _facts(pairs: Iterable[tuple[str, object]]) -> str:
    items = (
        f"<div><dt>{escape(key)}</dt><dd>{escape(str(value))}</dd></div>" for key, value in pairs
    )
    return f"<dl>{''.join(items)}</dl>"


def _findings(plan: Plan, would_fit: Sequence[str]) -> str:
    items = [
        f'<li class="{finding.level}">{finding.level}: {escape(str(finding))}</li>'
        for finding in sorted(plan.findings, key=lambda finding: finding.level)
    ]
    items += [f"<li>{escape(note)}</li>" for note in plan.notes]
    if would_fit:
        items.append(f"<li>What would fit: {escape('; or '.join(would_fit))}.</li>")
    return f"<h2>Findings</h2><ul>{''.join(items)}</ul>" if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], *, kind: str = "") -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    named = f' class="{kind}"' if kind else ""
    return f"<table{named}><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
