"""What the head sees of why an attempt ended: who sent a signal, whose memory ran out, what the logs of all nodes say."""

import json
import time
from dataclasses import replace

import pytest

from miles_hpc.node.exit_cause import cause_of_failure, cause_of_signal
from miles_hpc.run.cause import Cause
from miles_hpc.run.events import EventLog, Kind


def record(state="RUNNING", restarts=0):
    return f"JobId=7 JobName=x JobState={state} Reason=None Restarts={restarts} EndTime=Unknown\n"


def signalled(make_context, *, environ=None, job=None, **changes):
    context = make_context(**changes)
    context.stop.signal_name = "SIGTERM"
    if job is not None:
        context.run.job.write_text(json.dumps(job))
    return cause_of_signal(context, environ or {})


@pytest.mark.parametrize(
    ("state", "restarts", "cause"),
    [
        ("COMPLETING", 1, Cause.PREEMPTION),
        ("COMPLETING", 0, Cause.CANCELLED),
        ("RUNNING", 0, Cause.PREEMPTION),
    ],
)
def test_slurms_record_tells_a_requeue_from_a_cancel(
    make_context, fake_slurm, state, restarts, cause
):
    fake_slurm.answer("scontrol", stdout=record(state, restarts))
    found = signalled(make_context)
    assert found.cause is cause
    assert f"JobState={state} Restarts={restarts}" in found.evidence


def test_our_own_cancel_is_known_without_slurm(make_context, no_slurm):
    found = signalled(make_context, job={"cancel_requested_s": 1.0})
    assert found.cause is Cause.CANCELLED


def test_a_slurm_that_does_not_answer_leaves_the_cause_unknown(make_context, no_slurm):
    found = signalled(make_context)
    assert (found.cause, found.evidence) == (Cause.UNKNOWN, "SIGTERM; Slurm: no answer")


def test_a_signal_at_the_end_of_the_limit_is_the_limits(make_context, no_slurm):
    end = str(int(time.time()) + 5)
    found = signalled(make_context, environ={"SLURM_JOB_END_TIME": end})
    assert found.cause is Cause.TIME_LIMIT
    later = str(int(time.time()) + 500)
    found = signalled(make_context, environ={"SLURM_JOB_END_TIME": later})
    assert found.cause is Cause.UNKNOWN


def test_the_local_controllers_limit_is_read_from_job_json(make_context, no_slurm):
    context = make_context()
    context = replace(context, identity=replace(context.identity, cluster="local"))
    context.run.job.write_text(json.dumps({"submitted_s": time.time() - 60, "time_limit_s": 60.0}))
    assert cause_of_signal(context, {}).cause is Cause.TIME_LIMIT
    context.run.job.write_text(json.dumps({"submitted_s": time.time(), "time_limit_s": 60.0}))
    assert cause_of_signal(context, {}).cause is Cause.CANCELLED


def failed(context, kind="DriverError", message="it ended", code=1, driver_ran=True):
    return cause_of_failure(context, kind, message, code, driver_ran=driver_ran)


def test_a_node_that_is_not_fit_is_named_by_its_message(make_context):
    found = failed(make_context(), "PreflightError", "n2: scratch: found tmpfs", driver_ran=False)
    assert (found.cause, found.evidence) == (Cause.PREFLIGHT, "n2: scratch: found tmpfs")


def test_a_kill_for_memory_on_any_node_explains_every_later_error(make_context):
    context = make_context()
    EventLog(context.attempt.node_events("n3"), "n3").append(
        Kind.OOM_KILL, message="cgroup /x/job_7: oom_kill rose from 0 to 1"
    )
    for kind in ("NodeError", "DriverError"):
        found = failed(context, kind)
        assert found.cause is Cause.HOST_OOM
        assert found.evidence == "n3: cgroup /x/job_7: oom_kill rose from 0 to 1"


def test_a_node_error_is_of_the_bring_up_until_the_driver_has_been_started(make_context):
    context = make_context()
    message = "1 of 3 nodes joined"
    assert failed(context, "NodeError", message, driver_ran=False).cause is Cause.RAY_BRING_UP
    assert failed(context, "NodeError", message).cause is Cause.NODE_FAILURE


def test_a_node_whose_error_names_a_full_disk_ran_out_of_disk(make_context):
    message = "n2: OSError: [Errno 28] No space left on device: '/scratch/x'"
    found = failed(make_context(), "NodeError", message)
    assert (found.cause, found.evidence) == (Cause.DISK_FULL, f"the error: {message}")


def test_the_logs_of_rays_workers_on_all_nodes_are_read(make_context):
    context = make_context()
    dead = "Traceback (most recent call last):\n  f\nray.exceptions.ActorDiedError: it died\n"
    context.attempt.driver_log.write_text(dead)
    folder = context.attempt.ray_logs("n2")
    folder.mkdir()
    (folder / "worker-ab.err").write_text("fine\n" * 500 + "torch.OutOfMemoryError: CUDA out\n")
    found = failed(context)
    assert found.cause is Cause.GPU_OOM
    assert found.evidence.startswith("ray-n2/worker-ab.err: ")


def test_a_secret_does_not_come_back_as_evidence(make_context):
    context = make_context()
    context.redaction.add(("hunter2-hunter2",))
    context.attempt.driver_log.write_text("no access with hunter2-hunter2\n")
    assert "hunter2" not in failed(context).evidence
