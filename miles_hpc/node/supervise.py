"""Long-lived children of the node agent: start, watch and stop them, and note the signals that ask for the end.

Each child leads a session of its own, so a signal to the agent's group does not reach it. Knows nothing of Ray or drivers.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, TypeVar

from miles_hpc.errors import MilesHpcError

POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_DEADLINE_S = 10.0
# The scheduler may signal the group and the guard pass the same signal on; that is one request.
_SAME_REQUEST_S = 1.0

T = TypeVar("T")


class StopRequestedError(MilesHpcError):
    """A signal asked this agent to end; the attempt counts as cancelled."""


@dataclass(slots=True)
class StopRequest:
    """Which signal asked the agent to end, and how often; a second one ends the driver's grace.

    A thread of the agent may ask for the end too, by an error that then is the attempt's.
    """

    signal_name: str | None = None
    error: MilesHpcError | None = None
    count: int = 0
    _last_s: float = 0.0

    def install(self) -> None:
        """Note SIGTERM, SIGINT and SIGHUP; ignore USR1 and USR2, for this process and for the children it starts.

        Libraries in the children install their own USR handlers, so these signals never carry a request of ours.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._note)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    def end_because(self, error: MilesHpcError) -> None:
        """Ask the agent to end with `error`; the first one counts."""
        self.error = self.error or error

    def raise_if_requested(self) -> None:
        """Raise StopRequestedError once a signal has asked for the end, or the error that a thread ends the agent with."""
        if self.signal_name is not None:
            raise StopRequestedError(f"told to stop by {self.signal_name}")
        if self.error is not None:
            raise self.error

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.count == 0 or now_s - self._last_s > _SAME_REQUEST_S:
            self.count += 1
        self._last_s = now_s
        self.signal_name = self.signal_name or signal.Signals(number).name


@dataclass(slots=True)
class Child:
    """A process that this agent started, the leader of its own session."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""
        return self.process.poll()

    def terminate(
        self,
        *,
        grace_s: float,
        whole_group: bool = False,
        cut: Callable[[], bool] = lambda: False,
    ) -> int:
        """Send SIGTERM to it or its group, SIGKILL to the group after `grace_s` seconds or when `cut` says so.

        Returns the exit code, negative for a signal.
        """
        if whole_group:
            signal_group(self.process.pid, signal.SIGTERM)
        else:
            self.process.terminate()
        end_s = time.monotonic() + grace_s
        while self.poll() is None and time.monotonic() < end_s and not cut():
            time.sleep(POLL_S)
        if self.poll() is None:
            signal_group(self.process.pid, signal.SIGKILL)
        return self.process.wait(timeout=_KILL_DEADLINE_S)

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the last lines of its log."""
        return tail(self.log, num_lines)


def tail(path: Path, num_lines: int) -> str:
    """Return the last lines of the file at `path`, or a word that says why there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({error})"
    return "\n".join(lines[-num_lines:]) or "(empty)"


def start_child(
    name: str,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
) -> Child:
    """Start `argv` as leader of its own session, so that a signal to the agent's group does not reach it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=cwd,
            start_new_session=True,
        )
    return Child(name=name, process=process, log=log)


@dataclass(slots=True)
class LineReader:
    """Whole lines from a child's stdout, read without blocking."""

    process: subprocess.Popen[bytes]
    _rest: bytes = field(default=b"")

    def lines(self) -> tuple[str, ...]:
        """Return the lines that have arrived since the last call."""
        stream: IO[bytes] | None = self.process.stdout
        if stream is None:
            return ()
        while True:
            try:
                chunk = os.read(stream.fileno(), 65536)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._rest += chunk
        *whole, self._rest = self._rest.split(b"\n")
        return tuple(line.decode(errors="replace") for line in whole)


def start_reporter(
    name: str, argv: Sequence[str], *, environ: Mapping[str, str], log: Path
) -> tuple[Child, LineReader]:
    """Start a probe whose stdout is a stream of lines; its stdin is a pipe of ours, its stderr goes to `log`."""
    with log.open("ab") as errors:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=dict(environ),
            start_new_session=True,
        )
    if process.stdout is not None:
        os.set_blocking(process.stdout.fileno(), False)
    return Child(name=name, process=process, log=log), LineReader(process)


def wait_for(
    look: Callable[[], T | None], *, deadline_s: float, late: Callable[[], MilesHpcError]
) -> T:
    """Return the first value of `look` that is not None; raise `late()` when `deadline_s` seconds have passed."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = look()
        if value is not None:
            return value
        if time.monotonic() >= end_s:
            raise late()
        time.sleep(POLL_S)


def become_subreaper() -> None:
    """Make every orphaned descendant a child of this process, so that it is found and reaped at teardown."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(children: Iterable[Child]) -> None:
    """Collect the exit codes of adopted orphans; those of `children` stay with their own objects."""
    own = {child.process.pid: child for child in children}
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        if found.si_pid in own:
            own[found.si_pid].poll()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(found.si_pid, os.WNOHANG)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal the process group led by our own child `pid`; a group that is gone is none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send `number` to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def fork_into_own_session() -> int:
    """Fork; return 0 in the child, which leads a new session and is told by SIGTERM when its parent ends."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
    return pid
