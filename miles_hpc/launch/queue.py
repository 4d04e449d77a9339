"""What has become of a job, and its end on request, without an accounting database.

Slurm is asked with squeue's oldest options, then scontrol; a local job is its controller process, believed only with the
start time it was submitted with. Knows the run folder only to find its job and to see whether it has ended.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_hpc.errors import QueueError
from miles_hpc.handoff import read_handoff
from miles_hpc.launch.secret_intake import forget_secrets
from miles_hpc.paths import RunDir
from miles_hpc.process import Completed, run_short
from miles_hpc.run.events import read_events
from miles_hpc.run.pace import past_pace
from miles_hpc.run.report import JobReference, QueueView, Status, find_job, head_events, report
from miles_hpc.run.resume import read_identity, read_object, read_verdict, write_whole
from miles_hpc.run.save_request import ask_to_save, save_grace_s
from miles_hpc.slurm import LIVE_STATES

_ASK_TIMEOUT_S = 30.0
_CANCEL_MARGIN_S = 15.0
_POLL_S = 0.1
_ASK_INTERVAL_S = 0.5
_WAITING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_ENDED = ("ENDED", "GONE")
_UNKNOWN_JOB = re.compile(r"Invalid job id", re.IGNORECASE)


def open_run(path: Path) -> RunDir:
    """Return the run folder at `path`.

    Raises:
        QueueError: if there is none.
    """
    run = RunDir(Path(os.path.abspath(path.expanduser())))  # noqa: PTH100
    if not run.handoff.is_file():
        raise QueueError(
            f"{path}: found no handoff.json; expected a run folder, as submit and render print it. "
            "Give the folder itself, such as runs/demo-20260101-120000."
        )
    return run


def status(run: RunDir) -> Status:
    """Return the status of `run` now."""
    job = find_job(run) or _job_in_folder(run)
    return report(run, job, ask(run, job))


class EndWatch:
    """Says whether a run has ended; the scheduler is asked at most twice a second."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._next_ask_s = 0.0
        self._has_ended = False

    def __call__(self) -> bool:
        """Return whether nothing more will happen to the run by itself."""
        if not self._has_ended and time.monotonic() >= self._next_ask_s:
            now = status(self._run)
            self._has_ended = now.is_final or now.job_id is None
            self._next_ask_s = time.monotonic() + _ASK_INTERVAL_S
        return self._has_ended


def ask(run: RunDir, job: JobReference | None) -> QueueView:
    """Return what the scheduler says of `job`."""
    if job is None:
        return QueueView(state="UNKNOWN")
    return _ask_local(run, job) if job.cluster == "local" else _ask_slurm(job.job_id)


def _job_in_folder(run: RunDir) -> JobReference | None:
    """Return a queued job whose working directory is the run folder: one of plain `sbatch job.sbatch`."""
    done = _run(("squeue", "-h", "-o", "%i %Z"))
    jobs = [line.partition(" ") for line in done.stdout.splitlines()] if done.ok else []
    found = [job_id for job_id, _, folder in jobs if folder.strip() == str(run.root)]
    return JobReference(job_id=found[-1], cluster="slurm") if found else None


def _ask_slurm(job_id: str) -> QueueView:
    squeue = ("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T %r")
    first = _run(squeue)
    seen = _from_squeue(first)
    if seen is not None:
        return seen
    record = _run(("scontrol", "-o", "show", "job", job_id))
    state = re.search(r"\bJobState=(\S+)", record.stdout)
    if record.ok and state is not None:
        reason = re.search(r"\bReason=(\S+)", record.stdout)
        code = re.search(r"\bExitCode=(\d+):(\d+)", record.stdout)
        return _view(
            state[1], "" if reason is None else reason[1], 0 if code is None else int(code[1])
        )
    # Both may fail while the controller restarts, and squeue may answer emptily once: only a second answer counts.
    second = _run(squeue)
    seen = _from_squeue(second)
    if seen is not None:
        return seen
    if _is_unknown(second) and _is_unknown(record):
        return QueueView(state="GONE")
    failed = second if not _is_unknown(second) else record
    return QueueView(state="UNKNOWN", reason=f"Slurm does not answer: {failed.describe()}")


def _is_unknown(done: Completed) -> bool:
    return (done.ok and not done.stdout.strip()) or bool(_UNKNOWN_JOB.search(done.stderr))


def _from_squeue(done: Completed) -> QueueView | None:
    """Return what squeue says of a live job; None for no answer and for an ended one, whose exit code scontrol knows."""
    lines = done.stdout.splitlines() if done.ok else []
    word, _, reason = lines[0].strip().partition(" ") if lines else ("", "", "")
    return _view(word, reason, 0) if word in LIVE_STATES else None


def _view(word: str, reason: str, exit_code: int) -> QueueView:
    reason = "" if reason in ("None", "(null)") else reason
    if word in _WAITING_STATES:
        return QueueView(state="PENDING", word=word, reason=reason)
    if word in LIVE_STATES:
        return QueueView(state="RUNNING", word=word, reason=reason)
    return QueueView(state="ENDED", word=word, reason=reason, exit_code=exit_code or None)


def _ask_local(run: RunDir, job: JobReference) -> QueueView:
    host = job.details.get("host")
    if host is not None and host != socket.gethostname():
        return QueueView(
            state="UNKNOWN",
            reason=f"the job runs on {host}; ask there (miles-hpc status {run.root})",
        )
    if _controller(job) is not None or next(_agents(run), None) is not None:
        return QueueView(state="RUNNING", word="RUNNING")
    return QueueView(state="GONE")


def _controller(job: JobReference) -> int | None:
    """Return the pid of the job's controller if that very process lives."""
    if not job.job_id.isdigit():
        return None
    ticks = process_start_ticks(int(job.job_id))
    return (
        int(job.job_id) if ticks is not None and ticks == job.details.get("start_ticks") else None
    )


def process_start_ticks(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot, or None when it has ended (also if nobody has reaped it).

    Source: proc_pid_stat(5), fields 3 and 22.
    """
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _agents(run: RunDir) -> Iterator[int]:
    """Yield the pids of this user's node agents of `run`, recognised by their whole command."""
    wanted = b"\0".join((b"-m", b"miles_hpc.node", os.fsencode(run.root))) + b"\0"
    return _pids(lambda entry: (entry / "cmdline").read_bytes().endswith(wanted))


def _left_over(run: RunDir) -> Iterator[int]:
    """Yield the pids of this user's processes that carry the run folder in their environment."""
    wanted = b"MILES_HPC_RUN_DIR=" + os.fsencode(run.root)
    return _pids(lambda entry: wanted in (entry / "environ").read_bytes().split(b"\0"))


def _pids(belongs: Callable[[Path], bool]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if entry.stat().st_uid == os.getuid() and belongs(entry):
                yield int(entry.name)
        except OSError:
            continue


def cancel(run: RunDir, *, save: bool = False) -> Status:
    """End the job of `run` and return its status.

    A waiting job goes at once. A running one is asked by SIGTERM to its node agents, which clean up and write the verdict;
    if they have not done so when their grace is over, it is ended by force. With `save` its driver is first asked to save
    and stop, and has the time that `run.save_request` gives it; a job that has loaded no model has nothing to save.

    Raises:
        QueueError: if the run has no job, or the scheduler refuses.
    """
    job = find_job(run) or _job_in_folder(run)
    if job is None:
        raise QueueError(
            f"{run.root}: found no job; expected a submitted run. There is nothing to cancel."
        )
    view = ask(run, job)
    now = report(run, job, view)
    if now.is_final and view.state not in ("PENDING", "RUNNING"):
        forget_secrets(run)
        return now
    if view.state == "UNKNOWN":
        raise QueueError(
            f"{run.root}: job {job.job_id}: {view.reason}; expected to reach the scheduler. Try again when it answers."
        )
    _mark_cancelled(run)
    has_attempt = now.state in ("RUNNING", "SAVING") or (
        now.state == "STARTING" and now.attempt > 0
    )
    if save and has_attempt:
        _save_and_stop(run, job)
        view = ask(run, job)
    if view.state in _ENDED:
        forget_secrets(run)
        return status(run)
    if job.cluster == "local":
        _cancel_local(run, job)
    elif view.state == "PENDING" or not has_attempt:
        _scancel(job.job_id)
    else:
        _scancel("--signal=TERM", job.job_id)
    if view.state == "RUNNING" and not _wait_for_end(run, job, _grace_s(run)):
        _cancel_by_force(run, job)
    forget_secrets(run)
    return status(run)


def _save_and_stop(run: RunDir, job: JobReference) -> None:
    """Have the driver save and stop; return when the job has left its nodes or the driver has had its time."""
    attempt = tuple(run.attempts())[-1]
    identity = read_identity(attempt)
    pace = past_pace(run.events)
    for event in read_events(head_events(attempt)):
        pace.note(event)
    if identity is None or not pace.is_loaded or read_verdict(attempt) is not None:
        return
    try:
        ask_to_save(attempt, identity.key, "cancel", "miles-hpc cancel --save", replace=True)
    except OSError as error:
        raise QueueError(
            f"{attempt.save_request}: {error}; expected to leave the request to save there. Free space or cancel "
            f"without saving: miles-hpc cancel {run.root}"
        ) from error
    grace_s = save_grace_s(pace, read_handoff(run.handoff).save_grace_s)
    _wait_for_end(run, job, grace_s + _grace_s(run), ends=(*_ENDED, "PENDING"))


def _grace_s(run: RunDir) -> float:
    return 2 * read_handoff(run.handoff).stop_grace_s + _CANCEL_MARGIN_S


def _mark_cancelled(run: RunDir) -> None:
    details = read_object(run.job)
    if details is not None:
        details["cancel_requested_s"] = time.time()
        write_whole(run.job, json.dumps(details, indent=2, sort_keys=True) + "\n")


def _wait_for_end(
    run: RunDir, job: JobReference, timeout_s: float, *, ends: tuple[str, ...] = _ENDED
) -> bool:
    """Return whether the scheduler has seen the end of `job`, or another state of `ends`, within `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    ask_s = 0.0
    while time.monotonic() < end_s:
        if time.monotonic() >= ask_s:
            if ask(run, job).state in ends:
                return True
            ask_s = time.monotonic() + _ASK_INTERVAL_S
        time.sleep(_POLL_S)
    return False


def see_off(run: RunDir, patience_s: float) -> None:
    """Return when the scheduler has seen the end of the run's job; one that has its verdict and does not end is cancelled."""
    job = find_job(run)
    if job is not None and not _wait_for_end(run, job, patience_s):
        cancel(run)


def _cancel_local(run: RunDir, job: JobReference) -> None:
    controller = _controller(job)
    # The controller passes SIGTERM on to its agents; without it they are told directly.
    for pid in (controller,) if controller is not None else tuple(_agents(run)):
        _signal(pid, signal.SIGTERM)


def _cancel_by_force(run: RunDir, job: JobReference) -> None:
    if job.cluster == "slurm":
        _scancel(job.job_id)
        return
    controller = _controller(job)
    for pid in (
        *((controller,) if controller is not None else ()),
        *_agents(run),
        *_left_over(run),
    ):
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _scancel(*arguments: str) -> None:
    done = _run(("scancel", *arguments))
    if not done.ok and not _UNKNOWN_JOB.search(done.stderr):
        raise QueueError(
            f"cancel: {done.describe()}; expected Slurm to accept it. Try again, or use scancel yourself."
        )


def _run(argv: tuple[str, ...]) -> Completed:
    return run_short(argv, timeout_s=_ASK_TIMEOUT_S)
