"""What the head's agent can see of why an attempt ended: the error, kills for memory, logs of all nodes, Slurm's record.

Gathers; `run.cause` judges. A stop that a signal asked for is judged before the teardown, since Slurm may leave no time after
it; everything else after it, when Ray's logs are in the attempt folder.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_hpc.errors import DriverError, PreflightError
from miles_hpc.node.context import NodeContext
from miles_hpc.node.hang import HangError
from miles_hpc.run.cause import Cause, Finding, LogEnd, cause_of_driver_end, find_in_logs, one_line
from miles_hpc.run.events import Kind, read_events
from miles_hpc.run.resume import read_object
from miles_hpc.slurm import ask_job_record

_LOG_END_BYTES = 64 << 10
_MOST_LINES = 400
_MOST_LOGS = 200
_ASK_TIMEOUT_S = 5.0
# Slurm signals at the limit; its clock and ours may differ a little.
_LIMIT_SLACK_S = 30.0


def cause_of_signal(context: NodeContext, environ: Mapping[str, str] = os.environ) -> Finding:
    """Return who told this attempt to stop: the time limit, `cancel` or scancel, or Slurm that wants the nodes back."""
    signal_name = context.stop.signal_name or "a signal to another node"
    details = read_object(context.run.job) or {}
    end = environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and time.time() >= int(end) - _LIMIT_SLACK_S:
        return Finding(Cause.TIME_LIMIT, f"{signal_name} at the end of SLURM_JOB_END_TIME={end}")
    limit_s, since_s = details.get("time_limit_s"), details.get("submitted_s")
    if (
        isinstance(limit_s, int | float)
        and isinstance(since_s, int | float)
        and time.time() >= since_s + limit_s - 1
    ):
        evidence = f"{signal_name} after job.json's time_limit_s={limit_s:g}"
        return Finding(Cause.TIME_LIMIT, evidence)
    if "cancel_requested_s" in details:
        return Finding(Cause.CANCELLED, f"{signal_name}; job.json has cancel_requested_s")
    if context.identity.cluster == "local":
        return Finding(Cause.CANCELLED, f"{signal_name} to the local job")
    record = ask_job_record(context.identity.job_id, timeout_s=_ASK_TIMEOUT_S)
    said = " ".join(
        f"{name}={record[name]}" for name in ("JobState", "Restarts", "EndTime") if name in record
    )
    evidence = f"{signal_name}; Slurm: {said or 'no answer'}"
    restarts = record.get("Restarts", "")
    if restarts.isdecimal() and int(restarts) > context.identity.restart_count:
        return Finding(Cause.PREEMPTION, evidence)
    if record.get("JobState") == "COMPLETING":
        return Finding(Cause.CANCELLED, evidence)
    # Grace before a preemption: the job still runs, and nobody here has asked for its end.
    return Finding(Cause.PREEMPTION if record else Cause.UNKNOWN, evidence)


def cause_of_failure(
    context: NodeContext, kind: str, message: str, driver_code: int | None, *, driver_ran: bool
) -> Finding:
    """Return why the attempt failed.

    Args:
        context: the head's.
        kind: name of the error's class, on whatever node it was raised.
        message: what the error said.
        driver_code: what the driver returned; None when it never ran.
        driver_ran: the driver had been started, so the cluster had come up.
    """
    if kind == HangError.__name__:
        return Finding(Cause.HANG, one_line(message))
    if kind == PreflightError.__name__:
        return Finding(Cause.PREFLIGHT, one_line(message))
    killed = oom_evidence(context)
    if killed is not None:
        return Finding(Cause.HOST_OOM, killed)
    if kind == DriverError.__name__:
        return cause_of_driver_end(
            _log_end(context.attempt.driver_log, context), tuple(_other_logs(context)), driver_code
        )
    stated = find_in_logs((LogEnd("the error", tuple(message.splitlines())),))
    if stated is not None and stated.cause is not Cause.NODE_FAILURE:
        return stated
    cause = Cause.NODE_FAILURE if driver_ran else Cause.RAY_BRING_UP
    return Finding(cause, one_line(message))


def oom_evidence(context: NodeContext) -> str | None:
    """Return the first node's word on a kill for memory, or None."""
    for path in sorted(context.attempt.root.glob("events-*.jsonl")):
        for event in read_events(path):
            if event["kind"] == Kind.OOM_KILL:
                return f"{event.get('node')}: {event.get('message')}"
    return None


def _other_logs(context: NodeContext) -> Iterator[LogEnd]:
    """Yield the ends of the nodes' own logs, then of what Ray's workers wrote, newest first."""
    root = context.attempt.root
    for path in sorted(root.glob("*.log")):
        if path != context.attempt.driver_log:
            yield _log_end(path, context)
    written = []
    for pattern in ("ray-*/worker-*.err", "ray-*/worker-*.out", "ray-*/raylet.err"):
        written += [(path.stat().st_mtime, path) for path in root.glob(pattern)]
    for _, path in sorted(written, reverse=True)[:_MOST_LOGS]:
        yield _log_end(path, context)


def _log_end(path: Path, context: NodeContext) -> LogEnd:
    where = str(path.relative_to(context.attempt.root))
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_END_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return LogEnd(where, ())
    clean = context.redaction.clean(text)
    return LogEnd(where, tuple(clean.splitlines()[-_MOST_LINES:]))
