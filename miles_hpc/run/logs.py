"""`logs`: the driver's log or one node's, through all attempts, as it stands or as it grows.

Standard library only. Knows the files of a run folder; whether a run may still write is asked through a callable.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_hpc.errors import QueueError
from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.resume import read_identity

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20


class LogFile:
    """A growing file, read line by line from where the last read ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> Iterator[str]:
        """Yield the whole lines that were added since the last call; nothing while the file is missing."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                while chunk := file.read(_CHUNK_BYTES):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    yield from (line.decode(errors="replace") for line in lines)
        except FileNotFoundError:
            return

    def last_line(self) -> Iterator[str]:
        """Yield what stands after the last line break, once."""
        if self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""


def read_logs(run: RunDir, *, node: str | None) -> Iterator[str]:
    """Yield the lines of all attempts, each with the node's name before it.

    Args:
        run: the run folder.
        node: whose own log is wanted; None means the driver's.

    Raises:
        QueueError: if no attempt has such a log.
    """
    found = False
    several = len(tuple(run.attempts())) > 1
    for attempt in run.attempts():
        path, name = _log_of(attempt, node)
        if not path.is_file():
            continue
        found = True
        if several:
            yield _heading(attempt)
        log = LogFile(path)
        yield from (f"[{name}] {line}" for line in (*log.new_lines(), *log.last_line()))
    if not found:
        raise _no_log(run, node)


def follow_logs(run: RunDir, *, node: str | None, has_ended: Callable[[], bool]) -> Iterator[str]:
    """Yield lines like `read_logs` while the run goes on, over all its attempts; `has_ended` is asked when nothing is new."""
    done: set[int] = set()
    current: tuple[AttemptDir, LogFile, str] | None = None
    while True:
        ended = has_ended()
        for attempt in run.attempts():
            if attempt.number in done or (current and current[0].number == attempt.number):
                continue
            if current is not None:
                yield from _drain(current)
                done.add(current[0].number)
            path, name = _log_of(attempt, node)
            current = attempt, LogFile(path), name
            if attempt.number > 1:
                yield _heading(attempt)
        if current is not None:
            log, name = current[1], current[2]
            yield from (f"[{name}] {line}" for line in log.new_lines())
        if ended:
            break
        time.sleep(_POLL_S)
    if current is None:
        raise _no_log(run, node)
    yield from _drain(current)


def _drain(current: tuple[AttemptDir, LogFile, str]) -> Iterator[str]:
    _, log, name = current
    yield from (f"[{name}] {line}" for line in (*log.new_lines(), *log.last_line()))


def _log_of(attempt: AttemptDir, node: str | None) -> tuple[Path, str]:
    if node is not None:
        return attempt.node_log(node), node
    identity = read_identity(attempt)
    return attempt.driver_log, "head" if identity is None else identity.head_node


def _heading(attempt: AttemptDir) -> str:
    return f"--- attempt {attempt.number} ---"


def _no_log(run: RunDir, node: str | None) -> QueueError:
    if node is None:
        return QueueError(
            f"{run.root}: found no driver log; expected one once an attempt has started its driver. "
            f"Look at miles-hpc status, at --node NODE, and at what Slurm wrote in {run.submission}."
        )
    names = sorted({path.stem for attempt in run.attempts() for path in attempt.root.glob("*.log")})
    return QueueError(
        f"{run.root}: found no log of node {node!r}; expected one of: {', '.join(names) or 'none yet'}. Correct --node."
    )
