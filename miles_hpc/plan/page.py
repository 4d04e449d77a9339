"""A plan as one self-contained HTML page: figures, tables, environment with reasons, driver command.

Pure text out of a plan: no file, no script, nothing that a browser would fetch.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape

from miles_hpc.plan.figures import memory_figure, node_figure
from miles_hpc.plan.placement import group_spans
from miles_hpc.plan.plan import Plan

_STYLE = """
:root { color-scheme: light dark; --line: #c8ced4; --error: #b00020; --warning: #a05a00 }
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid var(--line) }
h3 { font-size: 1em } svg { max-width: 100%; height: auto; font-size: 12px }
table { border-collapse: collapse } th, td { text-align: left; vertical-align: top; padding: 3px 12px 3px 0 }
th { border-bottom: 1px solid var(--line) } td { overflow-wrap: anywhere } td:first-child { white-space: nowrap } code { font-size: 0.93em }
pre { white-space: pre-wrap; overflow-wrap: anywhere } .error { color: var(--error) } .warning { color: var(--warning) }
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
        *(_memory(plan, place, title) for place, title in _PLACES),
        "<h2>Nodes</h2>",
        node_figure(plan.layout, plan.rollout),
        "<h2>Layout</h2>",
        _table(("key", "value"), [*asdict(plan.layout).items(), *asdict(plan.rollout).items()]),
        "<h2>Communication groups</h2>",
        _table(
            ("axis", "ranks in a group", "groups", "nodes of a group"),
            [
                (span.axis, span.size, span.num_groups, span.nodes_per_group)
                for span in group_spans(plan.layout, plan.rollout)
                if span.size > 1
            ],
        ),
        "<h2>Environment</h2>",
        _table(
            ("variable", "value", "why", "source"),
            [(v.name, v.value, v.why, v.source) for v in plan.environment],
        ),
        "<h2>Driver</h2>",
        f"<pre>{escape(shlex.join(plan.driver_argv) or '(none in this version)')}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(plan.name)}: plan</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _memory(plan: Plan, place: str, title: str) -> str:
    figure = memory_figure(plan.memory, place)
    return f"<h3>{title}</h3>{figure}" if figure else ""


def _findings(plan: Plan, would_fit: Sequence[str]) -> str:
    items = [
        f'<li class="{finding.level}">{finding.level}: {escape(str(finding))}</li>'
        for finding in sorted(plan.findings, key=lambda finding: finding.level)
    ]
    items += [f"<li>{escape(note)}</li>" for note in plan.notes]
    if would_fit:
        items.append(f"<li>What would fit: {escape('; or '.join(would_fit))}.</li>")
    return f"<h2>Findings</h2><ul>{''.join(items)}</ul>" if items else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
