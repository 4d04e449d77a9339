"""Where every process of this job stands on this node: its kernel wait channels and its Python stacks.

    attempts/N/stacks/NODE.txt

Stacks come from py-spy where it is installed beside the node's Python or on PATH; else from the faulthandler of the processes
that have its handler (`probe.stack_hook`). Reads and asks; ends nothing.
"""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_hpc.node.context import NodeContext
from miles_hpc.node.survivors import owned_processes
from miles_hpc.probe.stack_hook import STACK_SIGNAL, stack_file
from miles_hpc.process import run_short
from miles_hpc.run.resume import write_whole

_DUMP_DEADLINE_S = 30.0
_PY_SPY_TIMEOUT_S = 10.0
_HANDLER_WAIT_S = 2.0
_POLL_S = 0.05
_MOST_BYTES = 1 << 20


def write_stacks(context: NodeContext, temp: Path | None, ask: Callable[[int], None]) -> None:
    """Write the stacks of this node's processes into the attempt folder.

    Args:
        context: this node's.
        temp: TMPDIR of the job's processes here; None before it was made.
        ask: sends STACK_SIGNAL to a process of the job.

    Raises:
        OSError: if the attempt folder cannot be written.
    """
    end_s = time.monotonic() + _DUMP_DEADLINE_S
    pids = sorted(owned_processes(context.job_tag))
    py_spy = find_py_spy(Path(context.handoff.python))
    files = {} if temp is None else {p: Path(stack_file(str(temp), p)) for p in pids if catches(p)}
    sizes = {pid: _size(path) for pid, path in files.items()}
    for pid in files:
        ask(pid)
    parts = [f"node {context.node}, {time.strftime('%Y-%m-%d %H:%M:%S')}: {len(pids)} processes"]
    for pid in pids:
        parts.append("\n".join(describe_process(pid)))
        if not is_python(pid):
            continue
        stacks = None
        if py_spy is not None and time.monotonic() < end_s:
            done = run_short((py_spy, "dump", "--pid", str(pid)), timeout_s=_PY_SPY_TIMEOUT_S)
            stacks = done.stdout.rstrip() if done.ok else None
            if stacks is None:
                parts.append(f"  py-spy: {done.describe()}")
        if stacks is None and pid in files:
            stacks = _handler_output(files[pid], sizes[pid], end_s)
        parts.append(stacks or "  no Python stack: no py-spy, and no handler of the process's own")
    path = context.attempt.stacks(context.node)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, context.redaction.clean("\n\n".join(parts)) + "\n")


def find_py_spy(python: Path) -> str | None:
    """Return py-spy's path: beside the node's Python, else on PATH."""
    beside = python.parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def describe_process(pid: int) -> Iterator[str]:
    """Yield what the kernel says of one process: its command, state, and what its threads wait in.

    Source: proc(5), "wchan", "stat"; "stack" can be read by root alone.
    """
    root = Path("/proc", str(pid))
    command = _text(root / "cmdline").replace("\0", " ").strip()[:200]
    yield f"process {pid}: {command or _text(root / 'comm').strip() or 'ended'}"
    waits: Counter[str] = Counter()
    for task in sorted(root.glob("task/*")):
        state = _text(task / "stat").rpartition(")")[2].split()
        channel = _text(task / "wchan").strip()
        waits[f"{state[0] if state else '?'} {channel if channel not in ('', '0') else '-'}"] += 1
    for wait, count in waits.most_common():
        yield f"  {count} thread{'s' if count > 1 else ''}: state and wait channel {wait}"
    kernel = _text(root / "stack").strip()
    if kernel:
        yield "  kernel stack of the first thread:"
        yield from (f"    {line}" for line in kernel.splitlines()[:20])


def catches(pid: int) -> bool:
    """Say whether process `pid` has a handler for STACK_SIGNAL; without one the signal would end it."""
    for line in _text(Path("/proc", str(pid), "status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def is_python(pid: int) -> bool:
    """Say whether process `pid` runs a Python interpreter."""
    try:
        return Path("/proc", str(pid), "exe").readlink().name.startswith("python")
    except OSError:
        return False


def _handler_output(path: Path, before: int, deadline_s: float) -> str:
    """Return what the handler has added to `path`, once it has stopped growing."""
    end_s = min(deadline_s, time.monotonic() + _HANDLER_WAIT_S)
    size, last = before, -1
    while time.monotonic() < end_s and (size == before or size != last):
        last = size
        time.sleep(_POLL_S)
        size = _size(path)
    try:
        with path.open("rb") as file:
            file.seek(before)
            text = file.read(_MOST_BYTES).decode(errors="replace").rstrip()
    except OSError as error:
        return f"  no Python stack: {error}"
    return text or "  no Python stack: the process did not answer"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""
