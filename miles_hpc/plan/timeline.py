"""The memory timeline as text: one line a phase, with bars against the limits, at most 100 columns wide.

Plain characters only; the same numbers as a figure are `page`.
"""

from collections.abc import Iterator, Sequence

from miles_hpc.plan.phases import MemoryPlan, Phase
from miles_hpc.units import format_bytes

_BAR = 20


def memory_lines(memory: MemoryPlan) -> tuple[str, ...]:
    """Return a head line and one line a phase: host memory of a node, memory of a GPU, scratch of a node.

    A bar is full at the limit, or at the largest phase when the spec names none; `|` in the host bar marks the alarm and
    `!` what is above it. The page cache, which the kernel takes back, is drawn as dots. Where rollout engines have GPUs of
    their own, the trainer's phases come first and theirs after them.
    """
    limits = memory.limits
    lines = list(_table(memory, memory.phases, "phase" if not memory.rollout_phases else "trainer"))
    if memory.rollout_phases:
        lines += _table(memory, memory.rollout_phases, "engines")
    lines.append(
        f"  limits: host {_limit(limits.host_bytes_per_node)}"
        f" (alarm {_limit(memory.alarm_host_bytes_per_node)}), GPU {_limit(limits.gpu_bytes_per_gpu)},"
        f" scratch {_limit(limits.scratch_bytes_per_node)}"
    )
    return tuple(lines)


def _table(memory: MemoryPlan, phases: Sequence[Phase], name: str) -> Iterator[str]:
    limits, everywhere = memory.limits, memory.everywhere
    on_gpu = any(phase.gpu_bytes_per_gpu for phase in phases)
    head = f"  {name:<12}{'host a node':<{_BAR + 14}}"
    head += f"{'GPU':<{_BAR + 14}}" if on_gpu else ""
    yield (head + "scratch").rstrip()
    host_full = limits.host_bytes_per_node or max(p.host_bytes_per_node for p in everywhere)
    gpu_full = limits.gpu_bytes_per_gpu or max(p.gpu_bytes_per_gpu for p in everywhere)
    for phase in phases:
        line = f"  {phase.name:<12}"
        line += _cell(phase.committed_host_bytes, _host_bar(phase, host_full, memory))
        if on_gpu:
            line += _cell(phase.gpu_bytes_per_gpu, _bar(phase.gpu_bytes_per_gpu, gpu_full))
        scratch = phase.scratch_bytes_per_node
        yield (line + (format_bytes(scratch) if scratch else "-")).rstrip()


def _cell(count: int, bar: str) -> str:
    return f"{format_bytes(count):>9} [{bar}] "


def _bar(count: int, full: int) -> str:
    filled = min(_BAR, -(-count * _BAR // full)) if full else 0
    return "#" * filled + " " * (_BAR - filled)


def _host_bar(phase: Phase, full: int, memory: MemoryPlan) -> str:
    committed, whole = (
        _bar(phase.committed_host_bytes, full),
        _bar(phase.host_bytes_per_node, full),
    )
    cells = [
        "#" if c == "#" else "." if w == "#" else " " for c, w in zip(committed, whole, strict=True)
    ]
    if memory.alarm_host_bytes_per_node is not None:
        alarm = min(_BAR - 1, memory.alarm_host_bytes_per_node * _BAR // full)
        if cells[alarm] != "#":
            cells[alarm] = "|"
        else:
            cells[alarm:] = ["!" if cell == "#" else cell for cell in cells[alarm:]]
    return "".join(cells)


def _limit(count: int | None) -> str:
    return "not given" if count is None else format_bytes(count)
