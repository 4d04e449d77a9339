"""`status`: what has become of a run, from its folder and from what the scheduler says of its job.

The head's verdict is believed first; the scheduler settles what no verdict tells. Standard library only. Knows no
scheduler command: `launch.queue` asks and passes a `QueueView`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.cause import Cause, Finding, cause_of_slurm_word
from miles_hpc.run.events import FieldValue, Kind, read_events
from miles_hpc.run.resume import (
    Verdict,
    read_identity,
    read_object,
    read_verdict,
    refused_reason,
)

State = Literal[
    "PENDING", "STARTING", "RUNNING", "SAVING", "REQUEUED", "COMPLETED", "FAILED", "CANCELLED", "UNKNOWN",
]  # fmt: skip
FINAL_STATES = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
_REFUSED_EXIT_CODE = 13
_CLOCK_SLACK_S = 1.0
_RUNS = frozenset({Kind.CLUSTER_READY, Kind.DRIVER_STARTED, Kind.PHASE, Kind.STEP})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """What the scheduler says of a job.

    Attributes:
        state: GONE means that the scheduler answered and no longer knows the job; UNKNOWN that it did not answer.
        word: the scheduler's own word, such as "TIMEOUT".
        exit_code: the job's exit code, where the scheduler tells one other than 0.
        reason: why it waits, or why there is no answer.
    """

    state: Literal["PENDING", "RUNNING", "ENDED", "GONE", "UNKNOWN"]
    word: str = ""
    exit_code: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReference:
    """Which job a run folder belongs to now.

    Attributes:
        details: job.json as it stands, empty after `render`.
    """

    job_id: str
    cluster: Literal["slurm", "local"]
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def cancel_requested(self) -> bool:
        """`miles-hpc cancel` has asked for the end of this job."""
        return "cancel_requested_s" in self.details


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The answer of `status`; `attempt` is 0 before the first.

    Attributes:
        cause / evidence: why the newest attempt of this job ended, `run.cause.Cause`, and the one line that shows it;
            None while it has not.
    """

    run_dir: str
    job_id: str | None
    state: State
    attempt: int
    exit_code: int | None
    driver_exit_code: int | None
    reason: str
    cause: str | None = None
    evidence: str | None = None

    @property
    def is_final(self) -> bool:
        """Nothing more will happen to this run by itself."""
        return self.state in FINAL_STATES

    def to_json(self) -> str:
        """Return the object that `status --json` prints."""
        return json.dumps(asdict(self))


def find_job(run: RunDir) -> JobReference | None:
    """Return the newest job that is known to belong to `run`: the submitted one, or a later one that took an attempt."""
    details = read_object(run.job) or {}
    submitted_s = details.get("submitted_s")
    since = submitted_s if isinstance(submitted_s, int | float) else 0.0
    for attempt in reversed(tuple(run.attempts())):
        identity = read_identity(attempt)
        if identity is None:
            continue
        if identity.started_s >= since and identity.job_id != details.get("job_id"):
            return JobReference(job_id=identity.job_id, cluster=identity.cluster)
        break
    if "job_id" not in details:
        return None
    return JobReference(
        job_id=str(details["job_id"]),
        cluster="local" if details.get("cluster") == "local" else "slurm",
        details=details,
    )


def report(run: RunDir, job: JobReference | None, view: QueueView) -> Status:
    """Return the status of `run`; `view` is what the scheduler says of `job`."""
    attempts = tuple(run.attempts())
    number = attempts[-1].number if attempts else 0
    attempt = _attempt_of(attempts, job)
    verdict = None if attempt is None else read_verdict(attempt)
    waits_again = (
        verdict is not None
        and verdict.state == "CANCELLED"
        and view.state == "PENDING"
        and not (job is not None and job.cancel_requested)
    )
    if verdict is not None and verdict.state != "REQUEUED" and not waits_again:
        return _status(run, job, number, _judged(verdict, job, view), verdict, view)
    found = _without_verdict(run, job, view, attempt, verdict)
    return _status(run, job, number, found, verdict, view)


def _judged(
    verdict: Verdict, job: JobReference | None, view: QueueView
) -> tuple[State, int | None, str]:
    """Return what the verdict says; a stop that nobody asked for but the time limit is a failure.

    Slurm says so itself; on the local cluster job.json holds the limit, which counts from submission.
    """
    if verdict.state != "CANCELLED" or job is None or job.cancel_requested:
        return verdict.state, verdict.exit_code, verdict.reason
    limit_s, since_s = job.details.get("time_limit_s"), job.details.get("submitted_s")
    is_over = (
        isinstance(limit_s, int | float)
        and isinstance(since_s, int | float)
        and verdict.ended_s - since_s >= limit_s - _CLOCK_SLACK_S
    )
    if view.word == "TIMEOUT" or is_over:
        return "FAILED", verdict.exit_code, f"job.time_limit is over; {verdict.reason}"
    return verdict.state, verdict.exit_code, verdict.reason


def _status(
    run: RunDir,
    job: JobReference | None,
    number: int,
    found: tuple[State, int | None, str],
    verdict: Verdict | None,
    view: QueueView,
) -> Status:
    why = _cause(found[0], verdict, view)
    return Status(
        run_dir=str(run.root),
        job_id=None if job is None else job.job_id,
        state=found[0],
        attempt=number,
        exit_code=found[1],
        driver_exit_code=None if verdict is None else verdict.driver_exit_code,
        reason=found[2],
        cause=None if why is None else why.cause.value,
        evidence=None if why is None else why.evidence,
    )


def _cause(state: State, verdict: Verdict | None, view: QueueView) -> Finding | None:
    """Return why the newest attempt ended: the head's word, or Slurm's where it left none or could not tell."""
    said = None if view.state != "ENDED" else cause_of_slurm_word(view.word, view.reason)
    if verdict is None:
        if state not in FINAL_STATES:
            return None
        return said or Finding(
            Cause.UNKNOWN, f"no verdict; the scheduler says {view.word or view.state}"
        )
    try:
        found = Finding(Cause(verdict.cause), verdict.evidence)
    except ValueError:
        found = Finding(Cause.UNKNOWN, verdict.evidence)
    if said is None or found.cause not in (Cause.UNKNOWN, Cause.CANCELLED):
        return found
    return said


def _attempt_of(attempts: tuple[AttemptDir, ...], job: JobReference | None) -> AttemptDir | None:
    if not attempts or job is None:
        return None
    identity = read_identity(attempts[-1])
    return attempts[-1] if identity is not None and identity.job_id == job.job_id else None


def _without_verdict(
    run: RunDir,
    job: JobReference | None,
    view: QueueView,
    attempt: AttemptDir | None,
    verdict: Verdict | None,
) -> tuple[State, int | None, str]:
    if job is None:
        return (
            "UNKNOWN",
            None,
            view.reason or "not submitted from here, and no job has taken an attempt",
        )
    if view.state == "UNKNOWN":
        return "UNKNOWN", None, view.reason
    if view.state == "PENDING":
        waits = f"waiting: {view.reason}" if view.reason else "waiting for nodes"
        return ("PENDING" if attempt is None else "REQUEUED"), None, waits
    if view.state == "RUNNING":
        if verdict is not None:
            return "REQUEUED", None, verdict.reason
        return _running(attempt, view)
    refusal = refused_reason(run, job.job_id)
    if refusal is not None and attempt is None:
        return "FAILED", _REFUSED_EXIT_CODE, refusal
    return _ended(job, view, attempt)


def _running(attempt: AttemptDir | None, view: QueueView) -> tuple[State, int | None, str]:
    if attempt is None:
        return "STARTING", None, view.reason or "the job has its nodes; no attempt has begun"
    progress = read_progress(attempt)
    if not progress.has_cluster:
        return "STARTING", None, "the nodes are joining"
    step = "" if progress.phase_step is None else f"step {progress.phase_step}"
    reason = ", ".join(part for part in (progress.phase, step) if part)
    return ("SAVING" if progress.phase == "save" else "RUNNING"), None, reason


def _ended(
    job: JobReference, view: QueueView, attempt: AttemptDir | None
) -> tuple[State, int | None, str]:
    who = "Slurm" if job.cluster == "slurm" else "the local controller"
    says = (
        f"{who} says {view.word}" if view.state == "ENDED" else f"{who} no longer knows the job"
    ) + (f" ({view.reason})" if view.reason else "")
    left = "no attempt began" if attempt is None else "the head node left no verdict"
    if view.word.startswith("CANCELLED") or (job.cancel_requested and view.word != "COMPLETED"):
        return "CANCELLED", view.exit_code, f"{says}; {left}"
    hint = f"; look into {attempt.root if attempt else 'submission/'}"
    return "FAILED", view.exit_code, f"{says}; {left}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an attempt has come, from its head node's events.

    Attributes:
        has_cluster: every node had joined.
        phase: the phase that began last, and `phase_step` its step; empty before the first.
        last_step: the fields of the newest ended step's event; empty before the first.
    """

    has_cluster: bool
    phase: str
    phase_step: int | None
    last_step: Mapping[str, FieldValue]

    @property
    def step(self) -> int | None:
        """The newest step that ended."""
        return _whole(self.last_step.get("step"))

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run."""
        return _whole(self.last_step.get("num_steps"))

    def number(self, name: str) -> float | None:
        """Return a numeric field of the newest step's event."""
        value = self.last_step.get(name)
        return float(value) if isinstance(value, int | float) else None


def read_progress(attempt: AttemptDir) -> Progress:
    """Return how far `attempt` has come; reads the head node's own file, since events.jsonl may lag behind it."""
    has_cluster, phase = False, ""
    phase_step: int | None = None
    last_step: Mapping[str, FieldValue] = {}
    for event in read_events(head_events(attempt)):
        kind = event["kind"]
        has_cluster = has_cluster or kind in _RUNS
        if kind == Kind.PHASE:
            phase, phase_step = str(event.get("phase", "")), _whole(event.get("step"))
        elif kind == Kind.STEP:
            last_step = event
    return Progress(
        has_cluster=has_cluster, phase=phase, phase_step=phase_step, last_step=last_step
    )


def head_events(attempt: AttemptDir) -> Path:
    """Return the events file of the attempt's head node."""
    identity = read_identity(attempt)
    return attempt.node_events("unknown" if identity is None else identity.head_node)


def _whole(value: FieldValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
