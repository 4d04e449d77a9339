"""The memory report as text: one line for each phase's plan and one for each node, with bars, at most 100 columns wide.

Plain characters only. Knows the report, not where its figures come from.
"""

from collections.abc import Iterator

from miles_hpc.run.memory_report import Measured, MemoryReport, PhaseReport
from miles_hpc.units import format_bytes

_BAR = 20
_NODE = 17
MOST_NODES = 8
"""Nodes shown in a phase, fullest first; the JSON has all."""


def memory_report_lines(report: MemoryReport) -> tuple[str, ...]:
    """Return the report's lines.

    A bar is full at the host's limit, or at the largest figure where the plan names none. `#` is memory that cannot be taken
    back, `.` the pages of files, `|` the alarm and `!` what is above it.
    """
    full = report.limits.get("host_bytes_per_node") or max(_host_figures(report), default=1)
    lines = [
        f"attempt {report.attempt} of {report.run_dir}" if report.attempt else "no attempt yet",
        f"  {'phase':<12}{'node':<{_NODE}}{'host':>10}  {'':<{_BAR + 2}} {'files':>9} {'GPU':>10} {'scratch':>10}",
    ]
    alarm = report.alarm_host_bytes_per_node
    for phase in report.phases:
        lines += _phase_lines(phase, full or 1, alarm)
    limits = report.limits
    lines.append(
        f"  limits: host {_limit(limits.get('host_bytes_per_node'))} (alarm {_limit(alarm)}), "
        f"GPU {_limit(limits.get('gpu_bytes_per_gpu'))}, scratch {_limit(limits.get('scratch_bytes_per_node'))}"
    )
    if not report.has_samples:
        lines.append("  No node has measured anything; the plan stands alone.")
    for event in report.alarms:
        lines += _message_lines(
            f"  alarm on {event.get('node', '')}:", str(event.get("message", ""))
        )
    if report.cause is not None and report.cause != "none":
        lines += _message_lines(f"  ended by {report.cause}:", report.evidence or "no evidence")
    return tuple(lines)


def _host_figures(report: MemoryReport) -> Iterator[int]:
    for phase in report.phases:
        for planned in (phase.planned, phase.planned_rollout):
            if planned is not None:
                yield planned.host_bytes_per_node
        yield from (measured.host_bytes for measured in phase.measured)


def _phase_lines(phase: PhaseReport, full: int, alarm: int | None) -> Iterator[str]:
    name, has_kinds = phase.name, phase.planned_rollout is not None
    plans = (
        ("plan, trainer" if has_kinds else "plan", phase.planned),
        ("plan, rollout", phase.planned_rollout),
    )
    for kind, planned in plans:
        if planned is None:
            continue
        yield _line(
            name,
            kind,
            planned.host_bytes_per_node,
            planned.page_cache_bytes,
            _bar(planned.host_bytes_per_node, planned.page_cache_bytes, full, alarm),
            (planned.gpu_bytes_per_gpu or None, planned.scratch_bytes_per_node or None),
        )
        name = ""
    if phase.planned is not None and not phase.measured:
        yield f"  {'':<12}not measured"
    ordered = sorted(phase.measured, key=lambda entry: -entry.host_bytes)
    for entry in ordered[:MOST_NODES]:
        yield _line(
            name,
            entry.node,
            entry.host_bytes,
            entry.file_bytes,
            _bar(entry.host_bytes, entry.file_bytes, full, alarm),
            (entry.gpu_bytes_per_gpu, entry.scratch_bytes),
        )
        name = ""
    if len(ordered) > MOST_NODES:
        yield _rest(ordered[MOST_NODES:])


def _rest(left_out: list[Measured]) -> str:
    return f"  {'':<12}and {len(left_out)} nodes below {format_bytes(left_out[0].host_bytes)}"


def _line(
    phase: str, node: str, host: int, files: int, bar: str, others: tuple[int | None, int | None]
) -> str:
    gpu, scratch = ("-" if count is None else format_bytes(count) for count in others)
    short = node if len(node) < _NODE else node[: _NODE - 4] + "..."
    text = (
        f"  {phase:<12}{short:<{_NODE}}{format_bytes(host):>10}  [{bar}] {format_bytes(files):>9}"
    )
    return f"{text} {gpu:>10} {scratch:>10}"


def _bar(total: int, files: int, full: int, alarm: int | None) -> str:
    whole = min(_BAR, -(-total * _BAR // full))
    committed = min(whole, -(-(total - files) * _BAR // full))
    cells = list("#" * committed + "." * (whole - committed) + " " * (_BAR - whole))
    if alarm is not None:
        mark = min(_BAR - 1, alarm * _BAR // full)
        if total > alarm:
            cells[mark:] = ["!" if cell == "#" else cell for cell in cells[mark:]]
        elif cells[mark] == " ":
            cells[mark] = "|"
    return "".join(cells)


def _message_lines(line: str, message: str) -> Iterator[str]:
    """Yield `line` and the message after it in lines of at most 100 columns."""
    for word in message.split():
        if len(line) + 1 + len(word) > 100:
            yield line
            line = "   "
        line += f" {word}"
    yield line


def _limit(count: int | None) -> str:
    return "not given" if count is None else format_bytes(count)
