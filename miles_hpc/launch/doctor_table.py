"""The table that `miles-hpc doctor` prints: one row for each check and what it found, worst first.

Nodes that found the same share a row. Knows no check and no job.
"""

import shutil
from collections.abc import Iterable, Sequence
from io import StringIO

from miles_hpc.launch.terminal import printable
from miles_hpc.run.node_report import LEVELS, DoctorReport, NodeFinding

MAX_WIDTH = 100
_MIN_WIDTH = 60
_SHOWN_NODES = 8
_SHOWN_VALUES = 2


def doctor_table(report: DoctorReport, width: int | None = None) -> str:
    """Return the table and its summary; `width` defaults to the terminal's, at most 100 columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if width is None:
        width = shutil.get_terminal_size((MAX_WIDTH, 24)).columns
    console = Console(
        file=StringIO(), width=max(_MIN_WIDTH, min(width, MAX_WIDTH)), color_system=None
    )
    table = Table(box=box.HORIZONTALS, show_lines=False, padding=(0, 1, 0, 0), expand=True)
    table.add_column("node", min_width=10, max_width=18, overflow="fold")
    table.add_column("check", min_width=8, max_width=14, overflow="fold")
    for name in ("found", "expected", "fix"):
        table.add_column(name, ratio=1, overflow="fold")
    for level in LEVELS:
        rows = tuple(_rows(report, level))
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        if rows and level != LEVELS[-1]:
            table.add_section()
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = (line.rstrip() for line in text.splitlines())
    return "\n".join([*lines, summary(report)])


def summary(report: DoctorReport) -> str:
    """Return the last line: how many nodes, faults and warnings there are."""
    count = {
        level: sum(1 for finding in report.findings if finding.level == level) for level in LEVELS
    }
    sick = {finding.node for finding in report.findings if finding.level == "fault"}
    nodes = f"{len(report.nodes)} node" + ("s" if len(report.nodes) != 1 else "")
    said = f"{len(sick)} of {nodes} not fit" if sick else f"{nodes} fit"
    return f"{said}: {count['fault']} faults, {count['warning']} warnings, {count['ok']} ok"


def _rows(report: DoctorReport, level: str) -> Iterable[Sequence[str]]:
    """Yield the rows of one level; of what is well, one row for each check."""
    groups: dict[tuple[str, ...], list[NodeFinding]] = {}
    for finding in report.findings:
        if finding.level == level:
            key = (
                (finding.check,)
                if level == "ok"
                else (finding.check, finding.found, finding.expected, finding.fix)
            )
            groups.setdefault(key, []).append(finding)
    for findings in groups.values():
        nodes = list(dict.fromkeys(finding.node for finding in findings))
        found = _few(list(dict.fromkeys(finding.found for finding in findings)), _SHOWN_VALUES)
        expected = _few(list(dict.fromkeys(f.expected for f in findings)), _SHOWN_VALUES)
        mark = {"fault": "FAULT ", "warning": "warning "}.get(level, "ok ")
        yield (
            f"{mark}{_named(nodes, report)}",
            findings[0].check,
            found,
            expected,
            findings[0].fix,
        )


def _named(nodes: list[str], report: DoctorReport) -> str:
    if len(nodes) > 1 and len(nodes) == len(report.nodes):
        return f"all {len(nodes)}"
    return _few(nodes, _SHOWN_NODES, ", ")


def _few(values: list[str], most: int, between: str = "; ") -> str:
    more = len(values) - most
    shown = between.join(values[:most])
    return f"{shown} and {more} more" if more > 0 else shown
