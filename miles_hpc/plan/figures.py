"""The two figures of a plan as inline SVG: memory by phase, and ranks and engines on nodes.

Text and rectangles only, no script and nothing from outside. Colours carry no meaning that a label does not say too; those
of limits and alarms come from the page, whose ground may be dark.
"""

from collections.abc import Sequence
from html import escape

from miles_hpc.plan.phases import MemoryPlan, Phase
from miles_hpc.plan.placement import dense_place, engine_of
from miles_hpc.plan.plan import Layout, RolloutLayout
from miles_hpc.units import format_bytes

PALETTE = (
    "#3b6ea5",
    "#d98d3a",
    "#5b9a58",
    "#b5564d",
    "#8a6fb0",
    "#8c6a54",
    "#c77fae",
    "#7d8790",
    "#b3a23a",
    "#4fa3b5",
)
MOST_NODES = 16
"""Nodes drawn; the others repeat the pattern."""
_LEFT, _BAR_WIDTH, _ROW = 96, 620, 30


def memory_figure(memory: MemoryPlan, place: str, phases: Sequence[Phase]) -> str:
    """Return stacked bars of `phases` in `place` ("host", "gpu" or "scratch") against its limit; "" when all are empty."""
    totals = {
        "host": "host_bytes_per_node",
        "gpu": "gpu_bytes_per_gpu",
        "scratch": "scratch_bytes_per_node",
    }
    sizes = [int(getattr(phase, totals[place])) for phase in phases]
    if not any(sizes):
        return ""
    limit: int | None = getattr(memory.limits, totals[place])
    full = max(*sizes, limit or 0)
    names = list(
        dict.fromkeys(n for phase in phases for n in phase.parts if n.startswith(f"{place}."))
    )
    colour = {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}
    body = []
    for row, (phase, size) in enumerate(zip(phases, sizes, strict=True)):
        top = 8 + row * _ROW
        body.append(_text(_LEFT - 8, top + 15, phase.name, anchor="end"))
        body += _stack(phase, names, colour, top, full)
        body.append(_text(_LEFT + _width(size, full) + 6, top + 15, format_bytes(size)))
    bottom = 8 + len(sizes) * _ROW
    marks = [("limit", limit)]
    if place == "host":
        marks.append(("alarm", memory.alarm_host_bytes_per_node))
    for index, (label, value) in enumerate(marks):
        if value is not None:
            x = _LEFT + _width(value, full)
            body.append(
                f'<line class="{label}" x1="{x}" y1="2" x2="{x}" y2="{bottom}" stroke="currentColor"'
                ' stroke-dasharray="4 3"/>'
            )
            body.append(
                _text(
                    x,
                    bottom + 14 + 14 * index,
                    f"{label} {format_bytes(value)}",
                    anchor="end",
                    kind=label,
                )
            )
    legend = bottom + 44
    for index, name in enumerate(names):
        x, y = _LEFT + index % 3 * 230, legend + index // 3 * 18
        body.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colour[name]}"/>')
        body.append(_text(x + 16, y, name.partition(".")[2].replace("_", " ")))
    return _svg(
        _LEFT + _BAR_WIDTH + 90, legend + -(-len(names) // 3) * 18, body, f"{place} memory by phase"
    )


def _stack(
    phase: Phase, names: list[str], colour: dict[str, str], top: int, full: int
) -> list[str]:
    bars, start = [], 0
    for name in names:
        count = phase.parts.get(name, 0)
        if count:
            left, right = _width(start, full), _width(start + count, full)
            title = f"<title>{escape(name.partition('.')[2])}: {format_bytes(count)}</title>"
            bars.append(
                f'<rect x="{_LEFT + left}" y="{top}" width="{max(1, right - left)}" height="22"'
                f' fill="{colour[name]}">{title}</rect>'
            )
            start += count
    return bars


def node_figure(layout: Layout, rollout: RolloutLayout) -> str:
    """Return the first nodes with their ranks: each box names its rank and place, each bar below the rollout engine."""
    box, gap, per_node = 86, 6, layout.ranks_per_node
    columns = min(per_node, 8)
    rows_in_node = -(-per_node // columns)
    node_width, node_height = columns * (box + gap) + 14, 28 + rows_in_node * 64
    across = max(1, 800 // (node_width + 10))
    nodes = min(layout.num_nodes, MOST_NODES)
    body = []
    for node in range(nodes):
        left, top = node % across * (node_width + 10), node // across * (node_height + 12)
        body.append(
            f'<rect x="{left}" y="{top}" width="{node_width}" height="{node_height}" rx="5" fill="none" stroke="#8a939b"/>'
        )
        body.append(_text(left + 8, top + 17, f"node {node}"))
        for local in range(per_node):
            x = left + 8 + local % columns * (box + gap)
            y = top + 26 + local // columns * 64
            body += _gpu_box(layout, rollout, node * per_node + local, x, y, box)
    height = -(-nodes // across) * (node_height + 12)
    if nodes < layout.num_nodes:
        body.append(
            _text(0, height + 14, f"and {layout.num_nodes - nodes} more nodes in the same pattern")
        )
        height += 22
    return _svg(across * (node_width + 10), height, body, "ranks and rollout engines on nodes")


def _gpu_box(
    layout: Layout, rollout: RolloutLayout, gpu: int, x: int, y: int, box: int
) -> list[str]:
    """Return the trainer rank on a GPU above the rollout engine there; either may be missing."""
    engine = engine_of(layout, rollout, gpu)
    body = _rank_box(layout, gpu, x, y, box) if gpu < layout.world_size else []
    if engine is not None:
        band = PALETTE[(engine + 4) % len(PALETTE)]
        body += [
            f'<rect x="{x}" y="{y + 43}" width="{box}" height="14" fill="{band}" fill-opacity="0.35"/>',
            _text(x + 5, y + 54, f"engine {engine}"),
        ]
    return body


def _rank_box(layout: Layout, rank: int, x: int, y: int, box: int) -> list[str]:
    place = dense_place(layout, rank)
    stage = PALETTE[place.pp % len(PALETTE)]
    axes = (("pp", layout.pp), ("dp", layout.dp), ("cp", layout.cp), ("tp", layout.tp))
    used = [f"{name}{getattr(place, name)}" for name, size in axes if size > 1]
    return [
        f'<rect x="{x}" y="{y}" width="{box}" height="40" rx="3" fill="{stage}" fill-opacity="0.25" stroke="{stage}"/>',
        _text(x + 5, y + 15, f"rank {rank}"),
        _text(x + 5, y + 32, " ".join(used) or "whole model"),
    ]


def _width(count: int, full: int) -> int:
    return round(count * _BAR_WIDTH / full) if full else 0


def _text(x: int, y: int, words: str, *, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor">{escape(words)}</text>'


def _svg(width: int, height: int, body: list[str], label: str) -> str:
    inner = "".join(body)
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
        f' aria-label="{escape(label)}">{inner}</svg>'
    )
