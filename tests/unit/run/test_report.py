"""What `status` says, for every way in which a job can be or end."""

import dataclasses
import json
import time

import pytest

from miles_hpc.run.events import Kind
from miles_hpc.run.report import QueueView, find_job, report
from miles_hpc.run.resume import Identity, new_attempt, write_whole
from tests.fakes.recipes import verdict

CLUSTER = (Kind.CLUSTER_READY, {"num_nodes": 2})
TRAIN = (Kind.PHASE, {"phase": "train", "step": 3})
SAVE = (Kind.PHASE, {"phase": "save", "step": 3})

PENDING = QueueView(state="PENDING", word="PENDING", reason="Resources")
RUNNING = QueueView(state="RUNNING", word="RUNNING")
GONE = QueueView(state="GONE")
SILENT = QueueView(state="UNKNOWN", reason="Slurm does not answer")


def ended(word, exit_code=None):
    return QueueView(state="ENDED", word=word, exit_code=exit_code)


def state_of(run, view):
    return report(run, find_job(run), view)


def test_the_object_has_the_fields_that_others_rely_on(make_run):
    run = make_run(verdict("FAILED", 12, -9, "killed"))
    assert json.loads(state_of(run, GONE).to_json()) == {
        "run_dir": str(run.root),
        "job_id": "4100",
        "state": "FAILED",
        "attempt": 1,
        "exit_code": 12,
        "driver_exit_code": -9,
        "reason": "killed",
        "cause": "unknown",
        "evidence": "",
    }


@pytest.mark.parametrize(
    ("told", "view", "cause"),
    [
        (("nccl", "driver.log: NCCL error"), ended("FAILED", 12), "nccl"),
        (("unknown", ""), ended("OUT_OF_MEMORY"), "host_oom"),
        (("cancelled", "SIGTERM"), ended("TIMEOUT"), "time_limit"),
        (("cancelled", "SIGTERM"), GONE, "cancelled"),
        (("a cause of a later version", ""), GONE, "unknown"),
    ],
)
def test_the_head_knows_the_cause_and_slurm_where_the_head_cannot(make_run, told, view, cause):
    one = dataclasses.replace(verdict("FAILED", 12), cause=told[0], evidence=told[1])
    assert state_of(make_run(one), view).cause == cause


@pytest.mark.parametrize(
    ("view", "cause", "evidence"),
    [
        (ended("NODE_FAIL"), "node_failure", "Slurm: JobState=NODE_FAIL"),
        (ended("TIMEOUT"), "time_limit", "Slurm: JobState=TIMEOUT"),
        (GONE, "unknown", "no verdict; the scheduler says GONE"),
        (RUNNING, None, None),
    ],
)
def test_without_a_verdict_slurms_word_is_the_evidence(make_run, view, cause, evidence):
    now = state_of(make_run(None), view)
    assert (now.cause, now.evidence) == (cause, evidence)


@pytest.mark.parametrize(
    ("view", "state", "reason"),
    [
        (PENDING, "PENDING", "Resources"),
        (RUNNING, "STARTING", "no attempt has begun"),
        (ended("FAILED", 127), "FAILED", "Slurm says FAILED"),
        (ended("COMPLETED"), "FAILED", "no attempt began"),
        (ended("CANCELLED"), "CANCELLED", "Slurm says CANCELLED"),
        (ended("TIMEOUT"), "FAILED", "Slurm says TIMEOUT"),
        (GONE, "FAILED", "no longer knows the job"),
        (SILENT, "UNKNOWN", "does not answer"),
    ],
    ids=lambda value: value.word or value.state if isinstance(value, QueueView) else None,
)
def test_before_the_first_attempt_only_the_scheduler_knows(make_run, view, state, reason):
    now = state_of(make_run(), view)
    assert (now.state, now.attempt, now.exit_code) == (state, 0, view.exit_code)
    assert reason in now.reason


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), "STARTING"),
        ((CLUSTER,), "RUNNING"),
        ((CLUSTER, TRAIN), "RUNNING"),
        ((CLUSTER, TRAIN, SAVE), "SAVING"),
        ((CLUSTER, SAVE, TRAIN), "RUNNING"),
    ],
)
def test_a_running_job_is_where_its_head_node_says(make_run, events, state):
    assert state_of(make_run(None, events=events), RUNNING).state == state


@pytest.mark.parametrize("view", [RUNNING, GONE, SILENT, ended("COMPLETED"), ended("FAILED", 12)])
@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "CANCELLED"])
def test_the_verdict_is_believed_whatever_the_scheduler_says(make_run, view, state):
    assert state_of(make_run(verdict(state, 5)), view).state == state


@pytest.mark.parametrize(
    ("view", "state"),
    [
        (PENDING, "REQUEUED"),
        (RUNNING, "REQUEUED"),
        (GONE, "FAILED"),
        (ended("CANCELLED"), "CANCELLED"),
        (ended("NODE_FAIL"), "FAILED"),
        (SILENT, "UNKNOWN"),
    ],
    ids=lambda value: value.word or value.state if isinstance(value, QueueView) else None,
)
def test_a_requeued_attempt_is_not_the_end(make_run, view, state):
    assert state_of(make_run(verdict("REQUEUED")), view).state == state


def test_a_preempted_attempt_whose_job_waits_again_is_no_cancelled_run(make_run):
    waits = QueueView(state="PENDING", word="PENDING", reason="BeginTime")
    run = make_run(verdict("CANCELLED", 1))
    assert report(run, find_job(run), waits).state == "REQUEUED"
    asked = make_run(verdict("CANCELLED", 1), details={"cancel_requested_s": 1.0})
    assert report(asked, find_job(asked), waits).state == "CANCELLED"


def test_a_killed_attempt_that_waits_again_is_requeued(make_run):
    assert state_of(make_run(None), PENDING).state == "REQUEUED"


def test_a_job_that_vanished_without_verdict_failed_and_says_where_to_look(make_run):
    now = state_of(make_run(None), GONE)
    assert (now.state, now.attempt) == ("FAILED", 1)
    assert "no verdict" in now.reason
    assert "attempts/1" in now.reason


def test_a_job_that_vanished_after_cancel_is_cancelled(make_run):
    run = make_run(None, details={"cancel_requested_s": time.time()})
    assert state_of(run, GONE).state == "CANCELLED"


def test_a_stop_at_the_time_limit_is_a_failure(make_run):
    stopped = dataclasses.replace(verdict("CANCELLED", 1), ended_s=time.time() + 60)
    assert state_of(make_run(stopped), ended("TIMEOUT")).state == "FAILED"
    assert state_of(make_run(stopped, details={"time_limit_s": 0.0}), GONE).state == "FAILED"
    assert state_of(make_run(stopped, details={"time_limit_s": 600.0}), GONE).state == "CANCELLED"
    asked = {"time_limit_s": 0.0, "cancel_requested_s": 1.0}
    assert state_of(make_run(stopped, details=asked), GONE).state == "CANCELLED"


def test_a_refused_job_says_why_with_its_exit_code(make_run):
    run = make_run()
    write_whole(run.attempts_root / ".refused-4100-0.json", '{"message": "job 9 is running here"}')
    now = state_of(run, ended("FAILED", 13))
    assert (now.state, now.exit_code, now.reason) == ("FAILED", 13, "job 9 is running here")


def test_a_rendered_folder_is_unknown_until_a_job_takes_an_attempt(make_run):
    run = make_run(submitted=False)
    assert (state_of(run, GONE).state, state_of(run, GONE).job_id) == ("UNKNOWN", None)
    run = make_run(None, submitted=False)
    assert state_of(run, RUNNING).job_id == "4100"


def test_a_job_that_took_an_attempt_later_is_the_one_that_counts(make_run):
    run = make_run(verdict("FAILED", 12))
    later = Identity(
        job_id="4200", restart_count=0, cluster="slurm", head_node="n1", started_s=time.time() + 1
    )
    new_attempt(run, later, resume="auto", max_attempts=3, is_live=lambda _: False)
    now = state_of(run, RUNNING)
    assert (now.job_id, now.state, now.attempt) == ("4200", "STARTING", 2)


def test_a_resubmitted_job_that_waits_is_not_its_predecessor(make_run):
    run = make_run(verdict("FAILED", 12))
    job = json.loads(run.job.read_text()) | {"job_id": "4200", "submitted_s": time.time() + 1}
    run.job.write_text(json.dumps(job))
    assert (state_of(run, PENDING).state, state_of(run, PENDING).job_id) == ("PENDING", "4200")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job_id": null}', "\x00"])
def test_a_broken_job_file_is_no_traceback(make_run, text):
    run = make_run()
    run.job.write_text(text)
    assert state_of(run, SILENT).state == "UNKNOWN"
