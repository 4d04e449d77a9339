"""What an attempt came to, and the end of this node's agent with it.

The head's verdict is the job's; another node reports to the head and waits for it. Knows no stage of the start.
"""

import contextlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from miles_hpc.errors import MilesHpcError, NodeError, PreflightError, TimeLimitError
from miles_hpc.node.context import NodeContext
from miles_hpc.node.exit_cause import cause_of_failure, cause_of_signal
from miles_hpc.node.merge import EventMerge
from miles_hpc.node.ray_cluster import HeadStoppedError, NodeFailedError
from miles_hpc.node.rendezvous import NodeFailure, report_failure_if_possible
from miles_hpc.node.save_and_stop import StoppedOnRequestError
from miles_hpc.node.supervise import POLL_S, StopRequestedError
from miles_hpc.node.teardown import NodeResources, stop_driver, stop_node, wait_for_workers
from miles_hpc.run.cause import Cause, Finding, one_line
from miles_hpc.run.events import Kind
from miles_hpc.run.resume import Verdict, VerdictState, spent_attempts, write_verdict
from miles_hpc.slurm import requeue_refusal

# How long a node that failed waits for the head to say so, before it ends with its own code.
_VERDICT_WAIT_S = 60.0

_CAUSES = {
    "cancel": Cause.CANCELLED,
    "memory_alarm": Cause.HOST_OOM,
    "time_limit": Cause.TIME_LIMIT,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the attempt ended, as far as this node can tell.

    Attributes:
        kind: name of the class of the error that ended it, on whatever node it was raised.
        finding: why it ended; None while that is still to be found out.
    """

    state: VerdictState
    exit_code: int
    reason: str
    spends_attempt: bool = True
    kind: str = ""
    finding: Finding | None = None


def judge(context: NodeContext, error: MilesHpcError) -> Outcome:
    """Return the outcome that `error` means, and tell the other nodes of it."""
    if isinstance(error, HeadStoppedError):
        return Outcome(state="COMPLETED", exit_code=0, reason="the head ended the attempt")
    if isinstance(error, StoppedOnRequestError) and context.stop.signal_name is None:
        log.warning("%s", error)
        return judge_stop(context, error)
    # A scheduler that ends a job signals all its processes: what fails then fails because of that.
    cancelled = context.stop.signal_name is not None
    if isinstance(error, NodeFailedError):
        cancelled = cancelled or error.failure.kind == StopRequestedError.__name__
    reason = context.redaction.clean(str(error))
    if cancelled and not isinstance(error, NodeFailedError):
        reason = f"{context.node}: told to stop by {context.stop.signal_name}"
    kind = error.failure.kind if isinstance(error, NodeFailedError) else type(error).__name__
    outcome = Outcome(
        state="CANCELLED" if cancelled else "FAILED",
        exit_code=StopRequestedError.exit_code if cancelled else error.exit_code,
        reason=reason,
        spends_attempt=not cancelled,
        kind=kind,
        finding=cause_of_signal(context) if cancelled and context.is_head else None,
    )
    log.error("%s", reason)
    with contextlib.suppress(OSError):
        context.events.append(Kind.NODE_FAILED, error=type(error).__name__, message=reason)
    if not context.is_head:
        failure = NodeFailure(
            node=context.node,
            kind=StopRequestedError.__name__ if cancelled else type(error).__name__,
            message=reason,
            exit_code=error.exit_code,
        )
        report_failure_if_possible(context.rendezvous, failure)
    return outcome


def judge_stop(context: NodeContext, error: StoppedOnRequestError) -> Outcome:
    """Return the outcome of an attempt whose driver was asked to save and stop: it depends on who asked."""
    reason = context.redaction.clean(str(error))
    finding = Finding(
        _CAUSES[error.request.cause], one_line(context.redaction.clean(error.request.reason))
    )
    if error.request.cause == "cancel":
        code = StopRequestedError.exit_code
        return Outcome(
            state="CANCELLED",
            exit_code=code,
            reason=reason,
            spends_attempt=False,
            finding=finding,
        )
    if error.request.cause == "memory_alarm":
        fix = 'agent.on_memory_alarm = "stop" ended the job. Find what grew with miles-hpc report.'
        return Outcome(
            state="FAILED",
            exit_code=NodeError.exit_code,
            reason=f"{reason}. {fix}",
            finding=finding,
        )
    outcome = Outcome(
        state="REQUEUED",
        exit_code=0,
        reason=reason,
        spends_attempt=not error.has_progress,
        finding=finding,
    )
    why = why_not_again(context, has_progress=error.has_progress)
    return outcome if why is None else end_of_time(outcome, why)


def why_not_again(context: NodeContext, *, has_progress: bool) -> str | None:
    """Return why a job that the time limit ends does not go back to the queue, or None when it may."""
    handoff = context.handoff
    if handoff.resume == "never":
        return 'job.resume is "never"'
    if context.identity.cluster == "local":
        return "the local cluster starts no job again"
    earlier = (a for a in context.run.attempts() if a.number < context.attempt.number)
    spent = spent_attempts(earlier) + (0 if has_progress else 1)
    if spent >= handoff.max_attempts:
        return f"attempts without success: {spent}, job.max_attempts = {handoff.max_attempts}"
    return None


def end_of_time(outcome: Outcome, why: str) -> Outcome:
    """Return the outcome of an attempt that the time limit ended and that no further one follows."""
    return replace(
        outcome,
        state="FAILED",
        exit_code=TimeLimitError.exit_code,
        reason=f"{outcome.reason}. The job is not requeued: {why}",
    )


def conclude(
    context: NodeContext, resources: NodeResources, merge: EventMerge, outcome: Outcome
) -> int:
    """Tear this node down, let the head write the verdict, and return this agent's exit code."""
    note_oom_kills(context, resources)
    if not context.is_head:
        seen = outcome.exit_code == 0 or wait_for_verdict(context)
        stop_node(context, resources)
        context.rendezvous.announce_gone(context.node)
        return 0 if seen else outcome.exit_code
    if outcome.state == "CANCELLED":
        # Slurm may not leave us the time to come back to this.
        record_verdict(context, outcome, None)
    driver_code = stop_driver(context, resources)
    context.events.append(Kind.DRIVER_EXITED, exit_code=driver_code)
    context.rendezvous.announce_stop(outcome.state, outcome.reason)
    late = wait_for_workers(context)
    if late:
        context.events.append(
            Kind.WARNING, message=f"nodes that did not say they stopped: {', '.join(late)}"
        )
    stop_node(context, resources)
    context.rendezvous.close()
    outcome = with_cause(context, outcome, driver_code, driver_ran=resources.driver is not None)
    context.events.append(
        Kind.ATTEMPT_ENDED,
        state=outcome.state,
        exit_code=outcome.exit_code,
        driver_exit_code=driver_code,
        reason=outcome.reason,
        cause=found_of(outcome).cause.value,
        evidence=found_of(outcome).evidence,
    )
    merge.run_once()
    record_verdict(context, outcome, driver_code)
    if outcome.state == "REQUEUED":
        refusal = requeue_refusal(context.identity.job_id)
        if refusal is not None:
            outcome = end_of_time(outcome, refusal)
            record_verdict(context, outcome, driver_code)
    forget_secrets(context, outcome)
    return outcome.exit_code


def note_oom_kills(context: NodeContext, resources: NodeResources) -> None:
    """Leave word for the head when the kernel has killed processes of the job on this node for their memory."""
    evidence = resources.oom.evidence()
    if evidence is not None:
        with contextlib.suppress(OSError):
            context.events.append(Kind.OOM_KILL, message=evidence)


def with_cause(
    context: NodeContext, outcome: Outcome, driver_code: int | None, *, driver_ran: bool
) -> Outcome:
    """Return `outcome` with why it ended, where that was not known at once."""
    if outcome.state != "FAILED" or outcome.finding is not None:
        return outcome
    finding = cause_of_failure(
        context, outcome.kind, outcome.reason, driver_code, driver_ran=driver_ran
    )
    log.error("%s", finding)
    return replace(outcome, finding=finding)


def found_of(outcome: Outcome) -> Finding:
    """Return why the attempt ended, as far as it is known."""
    if outcome.finding is not None:
        return outcome.finding
    return Finding(Cause.NONE if outcome.state == "COMPLETED" else Cause.UNKNOWN, "")


def forget_secrets(context: NodeContext, outcome: Outcome) -> None:
    """Remove the secrets stored at submission, unless Slurm may start this job again: requeued, or after a node's fault."""
    source = context.handoff.secrets
    node_faults = (PreflightError.exit_code, NodeError.exit_code)
    again = outcome.state in ("CANCELLED", "REQUEUED") or outcome.exit_code in node_faults
    if source is None or not source.is_stored or (again and context.handoff.resume == "auto"):
        return
    with contextlib.suppress(OSError):
        Path(source.path).unlink(missing_ok=True)


def record_verdict(context: NodeContext, outcome: Outcome, driver_code: int | None) -> None:
    """Write verdict.json."""
    verdict = Verdict(
        state=outcome.state,
        exit_code=outcome.exit_code,
        driver_exit_code=driver_code,
        reason=outcome.reason,
        ended_s=time.time(),
        spends_attempt=outcome.spends_attempt,
        cause=found_of(outcome).cause.value,
        evidence=found_of(outcome).evidence,
    )
    write_verdict(context.attempt, verdict)


def wait_for_verdict(context: NodeContext) -> bool:
    """Wait until the head has ended the attempt; say whether it has."""
    end_s = time.monotonic() + _VERDICT_WAIT_S
    while time.monotonic() < end_s and context.stop.count < 2:
        if context.rendezvous.is_stopped():
            return True
        time.sleep(POLL_S)
    return context.rendezvous.is_stopped()
