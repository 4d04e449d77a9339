"""Wait for a job and show how far it is: one live line on a terminal, one line per change elsewhere.

Knows events and status; `launch.queue` asks the scheduler. Ending the wait never ends the job.
"""

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from miles_hpc.launch.queue import status
from miles_hpc.launch.terminal import printable
from miles_hpc.paths import RunDir
from miles_hpc.run.report import Progress, Status, head_events, read_progress
from miles_hpc.run.resume import read_verdict
from miles_hpc.units import format_duration

INTERRUPTED_EXIT_CODE = 130
_NO_CODE = 1
_POLL_S = 0.1
_ASK_INTERVAL_S = 1.0
_FILE_LAG_S = 5.0
"""A verdict written on a node may reach the login node's view of a network file system this much later."""


class Display(Protocol):
    """Something that shows a run's progress."""

    def show(self, state: Status, progress: Progress) -> None:
        """Show the newest state; called whenever something may have changed."""

    def close(self) -> None:
        """Give the terminal back."""


def wait_for_run(run: RunDir, stream: TextIO) -> Status:
    """Show the progress of `run` on `stream` until it has ended, and return its last status."""
    display = make_display(stream)
    try:
        return _wait(run, display.show)
    finally:
        display.close()


def _wait(run: RunDir, show: Callable[[Status, Progress], None]) -> Status:
    watched = _HeadFile(run)
    state = status(run)
    next_ask_s = 0.0
    ended_s: float | None = None
    while True:
        changed = watched.has_changed()
        if changed or time.monotonic() >= next_ask_s:
            state = status(run)
            show(state, watched.progress)
            next_ask_s = time.monotonic() + _ASK_INTERVAL_S
        if state.is_final:
            ended_s = time.monotonic() if ended_s is None else ended_s
            if watched.has_verdict() or time.monotonic() - ended_s > _FILE_LAG_S:
                return state
        else:
            ended_s = None
        time.sleep(_POLL_S)


class _HeadFile:
    """The events and the verdict of the newest attempt, read again only when they have changed."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: tuple[int, int, bool] = (0, 0, False)
        self.progress = Progress(has_cluster=False, phase="", phase_step=None, last_step={})

    def has_changed(self) -> bool:
        """Read what is new; return whether there was anything."""
        attempts = tuple(self._run.attempts())
        if not attempts:
            return False
        newest = attempts[-1]
        try:
            size = head_events(newest).stat().st_size
        except OSError:
            size = 0
        seen = (newest.number, size, newest.verdict.exists())
        if seen == self._seen:
            return False
        self._seen = seen
        self.progress = read_progress(newest)
        return True

    def has_verdict(self) -> bool:
        """Say whether the newest attempt has its verdict."""
        attempts = tuple(self._run.attempts())
        return bool(attempts) and read_verdict(attempts[-1]) is not None


def wait_for_exit_code(run: RunDir, stream: TextIO) -> int:
    """Show the progress of `run` on `stream` and return its exit code; Ctrl-C ends the wait and not the job."""
    try:
        last = wait_for_run(run, stream)
    except KeyboardInterrupt:
        stream.write(
            f"\nThe job goes on. Follow it:  miles-hpc logs -f {run.root}\n"
            f"            Cancel it:  miles-hpc cancel {run.root}\n"
        )
        return INTERRUPTED_EXIT_CODE
    if "\n" in last.reason:
        stream.write(printable(last.reason) + "\n")
    return exit_code_of(last)


def exit_code_of(last: Status) -> int:
    """Return what `submit --wait` exits with: the job's own code, and never 0 for a job that did not complete."""
    if last.state == "COMPLETED":
        return last.exit_code or 0
    return last.exit_code or _NO_CODE


def make_display(stream: TextIO) -> Display:
    """Return the live display for a terminal and plain lines for everything else."""
    return _LiveDisplay(stream) if stream.isatty() else _PlainDisplay(stream)


class _PlainDisplay:
    """One line per change of state or step."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""

    def show(self, state: Status, progress: Progress) -> None:
        """Write a line if it differs from the one before it."""
        line = describe(state, progress)
        if line != self._last:
            self._last = line
            self._stream.write(line + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Do nothing: a line is complete when it is written."""


class _LiveDisplay:
    """One line that is redrawn, with a bar over the steps."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=Console(file=stream),
        )
        self._task = self._bar.add_task("", total=None, figures="")
        self._bar.start()

    def show(self, state: Status, progress: Progress) -> None:
        """Redraw the line."""
        step, num_steps = progress.step, progress.num_steps
        self._bar.update(
            self._task,
            description=f"attempt {state.attempt} {state.state} {progress.phase}".strip(),
            total=num_steps,
            completed=step or 0,
            figures=figures(progress),
        )

    def close(self) -> None:
        """Leave the last line standing."""
        self._bar.stop()


def describe(state: Status, progress: Progress) -> str:
    """Return one line about the run: attempt, state, phase and the newest step's figures."""
    attempt = f"attempt {state.attempt} " if state.attempt else ""
    if state.state in ("RUNNING", "SAVING"):
        phase = f" {progress.phase}" if progress.phase else ""
        of = "" if progress.phase_step is None else f" of step {progress.phase_step}"
        return f"{attempt}{state.state}{phase}{of if phase else ''}  {figures(progress)}".rstrip()
    reason, _, more = state.reason.partition("\n")
    return f"{attempt}{state.state}" + (f": {reason}" if reason else "") + (" ..." if more else "")


def figures(progress: Progress) -> str:
    """Return the newest step's reward, speed and the time left, for a person."""
    if progress.step is None:
        return ""
    parts = [f"step {progress.step}" + (f"/{progress.num_steps}" if progress.num_steps else "")]
    reward = progress.number("reward")
    speed = progress.number("tokens_per_s")
    left_s = progress.number("time_left_s")
    if reward is not None:
        parts.append(f"reward {reward:.3f}")
    if speed is not None:
        parts.append(f"{speed:.0f} tokens/s")
    if left_s is not None:
        parts.append(f"{format_duration(left_s)} left")
    return "  ".join(parts)
