"""What is left of a job on this node, and its end.

A process is ours if it descends from this agent or carries this job's tag in its environment; nothing else is ever
signalled, and no process is found by its name.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_hpc.node.supervise import POLL_S, Child, reap_orphans

TAG_VARIABLE = "MILES_HPC_JOB_TAG"
_KILL_DEADLINE_S = 10.0


def owned_processes(tag: str, *, descendants: bool = True) -> frozenset[int]:
    """Return the pids that carry `tag` or, with `descendants`, descend from this process; zombies left out.

    Descent is needed beside the tag: a process that sets its title, as Ray's workers do, overwrites the environment that
    others can read.
    """
    marker = f"{TAG_VARIABLE}={tag}".encode()
    me = os.getpid()
    parents: dict[int, int] = {}
    tagged: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        parent = _live_parent(entry)
        if parent is None:
            continue
        parents[int(entry.name)] = parent
        if _has_marker(entry, marker):
            tagged.add(int(entry.name))
    if descendants:
        tagged.update(pid for pid in parents if _descends(pid, me, parents))
    return frozenset(tagged)


def has_living_children(pid: int) -> bool:
    """Say whether any process that has not ended has `pid` as its parent."""
    return any(
        _live_parent(entry) == pid for entry in Path("/proc").iterdir() if entry.name.isdigit()
    )


def end_survivors(tag: str, children: Sequence[Child], *, grace_s: float) -> tuple[str, ...]:
    """End every process of this job on this node; return a description of each that had to be killed."""
    end_s = time.monotonic() + grace_s
    number = signal.SIGTERM
    killed: dict[int, str] = {}
    while True:
        reap_orphans(children)
        survivors = owned_processes(tag)
        if not survivors:
            return tuple(killed.values())
        if number is signal.SIGTERM or time.monotonic() >= end_s:
            for pid in survivors:
                if number is signal.SIGKILL:
                    killed.setdefault(pid, f"{pid} {_command(pid)}")
                _signal_owned(pid, number)
            number = signal.SIGKILL
        if time.monotonic() >= end_s + _KILL_DEADLINE_S:
            return tuple(f"{pid} {_command(pid)} (alive)" for pid in survivors)
        time.sleep(POLL_S)


def _signal_owned(pid: int, number: signal.Signals) -> None:
    """Signal `pid`; the caller has just seen that it is ours, and a pid is not given out again that soon."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _live_parent(entry: Path) -> int | None:
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None
    # The command, in parentheses, may hold blanks and parentheses itself.
    fields = text.rpartition(")")[2].split()
    return None if len(fields) < 2 or fields[0] in "ZX" else int(fields[1])


def _has_marker(entry: Path, marker: bytes) -> bool:
    try:
        return entry.stat().st_uid == os.getuid() and marker in (
            entry / "environ"
        ).read_bytes().split(b"\0")
    except OSError:
        return False


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80].strip()
    except OSError:
        return "?"
