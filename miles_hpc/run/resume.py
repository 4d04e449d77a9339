"""Attempts of a run folder: who may start the next one, which one is this job's, and how it ended.

`attempts/N` appears whole: the head writes `attempts/.new-KEY/attempt.json` and renames the folder to the next number, so
two jobs that start at once on one run folder cannot both get N. Standard library only, since the node agent imports it.
Knows no scheduler: whether another job still lives is asked through a callable.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from miles_hpc.errors import NodeError, ResumeError
from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.cause import Cause

VerdictState = Literal["COMPLETED", "FAILED", "CANCELLED", "REQUEUED"]
_STATES = ("COMPLETED", "FAILED", "CANCELLED", "REQUEUED")
_POLL_S = 0.05
_STEP = re.compile(r"step-([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """attempt.json: which execution of which job an attempt is.

    Attributes:
        job_id: Slurm's job id, or the process id of submitit's controller on the local cluster.
        restart_count: SLURM_RESTART_COUNT; 0 for the first execution of a job.
        head_node: name of the node with index 0.
    """

    job_id: str
    restart_count: int
    cluster: Literal["slurm", "local"]
    head_node: str
    started_s: float

    @property
    def key(self) -> str:
        """Name of this execution, unique within a run folder."""
        return attempt_key(self.job_id, self.restart_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """verdict.json: the head's last word on an attempt.

    Attributes:
        state: REQUEUED means that Slurm will start the job again and the run goes on.
        exit_code: the head agent's own exit code, which is the job's.
        driver_exit_code: what the driver returned, negative for a signal; None when it never ran.
        reason: one line for a person.
        spends_attempt: the attempt counts against job.max_attempts. One that was preempted, or that the time limit ended
            after it had saved something new, does not.
        cause / evidence: `run.cause.Cause`, and the one line that shows it.
    """

    state: VerdictState
    exit_code: int
    driver_exit_code: int | None
    reason: str
    ended_s: float
    spends_attempt: bool = True
    cause: str = Cause.UNKNOWN.value
    evidence: str = ""


def attempt_key(job_id: str, restart_count: int) -> str:
    """Return the part of a file name that names one execution of one job."""
    return f"{job_id}-{restart_count}"


def write_whole(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` so that a reader on any node sees the whole file or none; raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in `path`, or None when there is no such file or it is not an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if isinstance(raw, dict) else None


def write_verdict(attempt: AttemptDir, verdict: Verdict) -> None:
    """Write verdict.json of `attempt` whole; raises OSError."""
    write_whole(attempt.verdict, json.dumps(asdict(verdict), indent=2) + "\n")


def read_verdict(attempt: AttemptDir) -> Verdict | None:
    """Return the verdict of `attempt`, or None while it has none."""
    raw = read_object(attempt.verdict)
    if raw is None or raw.get("state") not in _STATES or not isinstance(raw.get("exit_code"), int):
        return None
    try:
        return Verdict(**raw)  # type: ignore[arg-type]
    except TypeError:
        return None


def read_identity(attempt: AttemptDir) -> Identity | None:
    """Return whose `attempt` is, or None when attempt.json cannot be read."""
    raw = read_object(attempt.identity)
    if raw is None:
        return None
    try:
        return Identity(**raw)  # type: ignore[arg-type]
    except TypeError:
        return None


def new_attempt(
    run: RunDir,
    identity: Identity,
    *,
    resume: Literal["auto", "never"],
    max_attempts: int,
    is_live: Callable[[Identity], bool],
) -> AttemptDir:
    """Take the next attempt of `run` for the job `identity`; called on the head node alone.

    A refusal is also left in `attempts/`, so that the job's other nodes (`find_attempt`) need not wait for their deadline.
    `is_live` says whether the job of an attempt without a verdict still runs; it is not asked for earlier attempts of
    this job, since a requeued job has ended before it starts again.

    Raises:
        ResumeError: if another live job uses the folder, the attempts are used up, a further one is forbidden by
            `resume`, this very execution has an attempt already, or the folder cannot be written.
    """
    try:
        run.attempts_root.mkdir(parents=True, exist_ok=True)
        return _take(run, identity, resume=resume, max_attempts=max_attempts, is_live=is_live)
    except OSError as error:
        raise ResumeError(
            f"{run.attempts_root}: {error}; expected a folder that the head node can write. "
            "Put the run folder on a writable file system that every node sees."
        ) from error
    except ResumeError as error:
        write_whole(_refusal(run, identity.key), json.dumps({"message": str(error)}) + "\n")
        raise


def _take(
    run: RunDir,
    identity: Identity,
    *,
    resume: Literal["auto", "never"],
    max_attempts: int,
    is_live: Callable[[Identity], bool],
) -> AttemptDir:
    fresh = run.attempts_root / f".new-{identity.key}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write_whole(fresh / "attempt.json", json.dumps(asdict(identity), indent=2) + "\n")
        while True:
            earlier = tuple(run.attempts())
            _refuse_unless_free(run, identity, earlier, is_live)
            number = earlier[-1].number + 1 if earlier else 1
            if earlier and resume == "never":
                raise ResumeError(
                    f'{run.root}: found attempt {earlier[-1].number}; expected none, since job.resume is "never". '
                    "Submit the spec again into a new run folder."
                )
            spent = spent_attempts(earlier)
            if spent >= max_attempts:
                raise ResumeError(
                    f"{run.root}: {spent} attempts have ended without success; expected fewer than "
                    f"job.max_attempts = {max_attempts}. "
                    "Read the attempts' reasons, then allow more: miles-hpc resume RUN --set job.max_attempts=N."
                )
            attempt = run.attempt(number)
            try:
                fresh.rename(attempt.root)
            except OSError:
                # Only a folder that appeared meanwhile explains it; then look again at who holds the run.
                if not attempt.root.exists():
                    raise
                continue
            return attempt
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def spent_attempts(attempts: Iterable[AttemptDir]) -> int:
    """Return how many of `attempts` count against job.max_attempts; one that left no verdict does."""
    verdicts = (read_verdict(attempt) for attempt in attempts)
    return sum(verdict is None or verdict.spends_attempt for verdict in verdicts)


def _refuse_unless_free(
    run: RunDir,
    identity: Identity,
    earlier: tuple[AttemptDir, ...],
    is_live: Callable[[Identity], bool],
) -> None:
    for attempt in earlier:
        holder = read_identity(attempt)
        if holder is None:
            continue
        if holder.key == identity.key:
            raise ResumeError(
                f"{attempt.root}: job {identity.job_id} has used this execution's attempt already; expected one step per "
                "allocation. Submit the job again for a further attempt."
            )
        if holder.job_id == identity.job_id or read_verdict(attempt) is not None:
            continue
        if is_live(holder):
            raise ResumeError(
                f"{run.root}: job {holder.job_id} is running attempt {attempt.number} here since "
                f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(holder.started_s))}; expected one live job a run folder. "
                f"Wait for it, or cancel it: miles-hpc cancel {run.root}"
            )


def find_attempt(run: RunDir, job_id: str, restart_count: int) -> AttemptDir | None:
    """Return the attempt that the head took for this execution, or None while there is none yet.

    Raises:
        ResumeError: with the head's own message, if the head was refused.
    """
    key = attempt_key(job_id, restart_count)
    for attempt in reversed(tuple(run.attempts())):
        identity = read_identity(attempt)
        if identity is not None and identity.key == key:
            return attempt
    refused = read_object(_refusal(run, key))
    if refused is not None:
        raise ResumeError(str(refused.get("message")))
    return None


def wait_for_attempt(
    run: RunDir, job_id: str, restart_count: int, *, deadline_s: float
) -> AttemptDir:
    """Wait until the head has taken this execution's attempt; called on every other node.

    Raises:
        ResumeError: if the head was refused.
        NodeError: if there is no attempt `deadline_s` seconds from now.
    """
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        attempt = find_attempt(run, job_id, restart_count)
        if attempt is not None:
            return attempt
        time.sleep(_POLL_S)
    raise NodeError(
        f"{run.attempts_root}: no attempt of job {job_id} (restart {restart_count}) after {deadline_s:g} s; expected the head "
        "node (index 0) to make it. Look at the head's output in submission/, and whether the run folder is shared by all nodes."
    )


def refused_reason(run: RunDir, job_id: str) -> str | None:
    """Return why the newest execution of `job_id` got no attempt, or None when none was refused."""
    pattern = re.compile(rf"\.refused-{re.escape(job_id)}-([0-9]+)\.json")
    found = [
        (int(match[1]), entry)
        for entry in run.attempts_root.glob(".refused-*.json")
        if (match := pattern.fullmatch(entry.name))
    ]
    raw = read_object(max(found)[1]) if found else None
    return None if raw is None else str(raw.get("message"))


def latest_checkpoint(run: RunDir) -> Path | None:
    """Return the complete checkpoint of the largest step, or None; one without COMPLETE does not exist."""
    complete = [
        (int(match[1]), entry)
        for entry in run.checkpoints.glob("step-*")
        if (match := _STEP.fullmatch(entry.name)) and (entry / "COMPLETE").is_file()
    ]
    return max(complete)[1] if complete else None


def _refusal(run: RunDir, key: str) -> Path:
    return run.attempts_root / f".refused-{key}.json"
