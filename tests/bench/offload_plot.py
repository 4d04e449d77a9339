"""Draw what tests/bench/offload.py measured: each way's rate as a part of the disk's limit, out and back, as an SVG.

    python tests/bench/offload_plot.py docs/measurements/offload.md docs/measurements/offload.svg

reads the tables of the page, so that picture and figures cannot differ. Standard library only.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from svg_chart import page

TARGET = 0.9
NOT_ON_DISK = ("host arena", "pinned anew", "torch_memory_saver pinned")
_COLOURS = {"out": "#3b6ea5", "back": "#d98c3f"}
_LEFT, _WIDTH, _BAR, _ROW, _TOP = 190, 420, 8, 22, 44
_LIMIT = re.compile(r"[Ll]imit ([\d.]+) GB/s out, ([\d.]+) GB/s back")


@dataclass(frozen=True)
class Bar:
    """One way: its rates divided by the limit."""

    way: str
    out: float
    back: float


@dataclass(frozen=True)
class Panel:
    """One table."""

    title: str
    bars: tuple[Bar, ...]


def panel(title: str, bars: Iterable[Bar]) -> Panel:
    """Leave out what is no disk at all, and the slower depths of the raw rate, which is 1 by definition."""
    kept = [bar for bar in bars if bar.way not in NOT_ON_DISK and not bar.way.startswith("raw")]
    return Panel(title, tuple(kept))


def panels_of_page(text: str) -> list[Panel]:
    """Read the tables of docs/measurements/offload.md; each follows a line with its limit."""
    found: list[Panel] = []
    machine, title, bars = "", "", list[Bar]()
    for line in [*text.splitlines(), "## end"]:
        limit = _LIMIT.search(line)
        if (limit or line.startswith("##")) and title:
            found.append(panel(title, bars))
            title, bars = "", []
        if line.startswith("## "):
            machine = line[3:]
        elif limit:
            ranks = re.split(r"[.;]", line.lstrip("# "))[0].strip()
            title = f"{machine}: {ranks} (limit {limit[1]} out, {limit[2]} back, GB/s)"
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if title and len(cells) >= 5 and re.fullmatch(r"[\d.]+", cells[2]):
            bars.append(Bar(cells[0], float(cells[2]), float(cells[4])))
    return found


def draw(panels: Sequence[Panel]) -> str:
    """Return the SVG: one panel below the other, the target as a line."""
    shapes: list[str] = []
    y = 10
    for one in panels:
        bottom = y + _TOP + _ROW * len(one.bars)
        shapes.append(f'<text x="10" y="{y + 16}" font-weight="bold">{escape(one.title)}</text>')
        for part in (0.0, 0.25, 0.5, 0.75, TARGET, 1.0):
            x = _x(part)
            colour = "#b02a2a" if part == TARGET else "#cccccc"
            shapes.append(
                f'<line x1="{x}" x2="{x}" y1="{y + _TOP - 6}" y2="{bottom}" stroke="{colour}"/>'
            )
            if part != 1.0:
                shapes.append(
                    f'<text x="{x}" y="{y + _TOP - 10}" text-anchor="middle">{part:g}</text>'
                )
        for index, bar in enumerate(one.bars):
            top = y + _TOP + _ROW * index
            shapes.append(
                f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{escape(bar.way)}</text>'
            )
            for offset, (name, value) in enumerate((("out", bar.out), ("back", bar.back))):
                shapes.append(
                    f'<rect x="{_LEFT}" y="{top + offset * _BAR}" width="{_x(min(value, 1.25)) - _LEFT}" '
                    f'height="{_BAR - 1}" fill="{_COLOURS[name]}"><title>{name} {value:.2f}</title></rect>'
                )
        y = bottom + 14
    key = (
        f'<rect x="{_LEFT}" y="{y}" width="12" height="8" fill="{_COLOURS["out"]}"/>'
        f'<text x="{_LEFT + 18}" y="{y + 8}">out</text>'
        f'<rect x="{_LEFT + 60}" y="{y}" width="12" height="8" fill="{_COLOURS["back"]}"/>'
        f'<text x="{_LEFT + 78}" y="{y + 8}">back, as parts of the best raw direct-I/O rate; red: the target</text>'
    )
    width, height = _LEFT + _WIDTH + 20, y + 22
    return page(width, height, [*shapes, key])


def _x(part: float) -> int:
    return _LEFT + round(part * _WIDTH / 1.25)


def main() -> None:
    table, picture = map(Path, sys.argv[1:])
    picture.write_text(draw(panels_of_page(table.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
