"""A line chart as an SVG. Standard library only; tests/bench/offload_plot.py draws its bars with the same frame."""

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3b6ea5", "#d98c3f", "#5f9e5f", "#8a5fa8")
_LEFT, _TOP, _WIDTH, _HEIGHT = 60, 24, 440, 240


def page(width: int, height: int, shapes: Sequence[str]) -> str:
    """Return the whole SVG with `shapes` on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str
) -> str:
    """Return a chart of named lines of (x, y) points, both axes from zero."""
    points = [point for line in lines.values() for point in line]
    x_end, y_end = max(x for x, _ in points), max(y for _, y in points) * 1.05

    def at(x: float, y: float) -> tuple[float, float]:
        return round(_LEFT + _WIDTH * x / x_end, 1), round(_TOP + _HEIGHT * (1 - y / y_end), 1)

    shapes = [
        f'<text x="{_LEFT}" y="14">{escape(y_label)}</text>',
        f'<text x="{_LEFT + _WIDTH // 2}" y="{_TOP + _HEIGHT + 32}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        place = at(x, 0)
        shapes.append(f'<text x="{place[0]}" y="{place[1] + 14}" text-anchor="middle">{x:g}</text>')
    for step in range(5):
        value = y_end * step / 4
        y = at(0, value)[1]
        shapes += [
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y}" y2="{y}" stroke="#cccccc"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.1f}</text>',
        ]
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line))
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        shapes += [
            f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>'
            for x, y in (at(*point) for point in line)
        ]
        key_y = _TOP + 14 * (index + 1)
        shapes.append(f'<text x="{_LEFT + 10}" y="{key_y}" fill="{colour}">{escape(name)}</text>')
    return page(_LEFT + _WIDTH + 20, _TOP + _HEIGHT + 44, shapes)
