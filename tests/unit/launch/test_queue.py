"""The state and the end of a job, asked of commands that behave like real and of those that misbehave."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from miles_hpc.errors import QueueError
from miles_hpc.launch.queue import EndWatch, ask, cancel, open_run, process_start_ticks, status
from miles_hpc.run.events import Kind
from miles_hpc.run.report import find_job
from miles_hpc.run.save_request import read_save_request
from tests.fakes.recipes import verdict

FAILED_RECORD = (
    "JobId=4100 JobName=demo UserId=u(1) JobState=FAILED Reason=NonZeroExitCode Dependency=(null) Requeue=1 Restarts=0 "
    "BatchFlag=1 Reboot=0 ExitCode=12:0 RunTime=00:00:09 Comment=JobState=RUNNING\n"
)


def view_of(run):
    return ask(run, find_job(run))


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("PENDING Resources", "PENDING"),
        ("CONFIGURING None", "RUNNING"),
        ("RUNNING None", "RUNNING"),
        ("COMPLETING None", "RUNNING"),
        ("REQUEUE_HOLD job requeued in held state", "PENDING"),
        ("SUSPENDED None", "RUNNING"),
    ],
)
def test_squeues_words_become_our_states(fake_slurm, make_run, line, state):
    fake_slurm.answer("squeue", stdout=line + "\n")
    assert view_of(make_run()).state == state
    assert fake_slurm.calls("scontrol") == []


def test_only_options_that_the_oldest_squeue_knows_are_used(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    view_of(make_run())
    for call in fake_slurm.calls("squeue"):
        assert {word for word in call["argv"] if word.startswith("-")} <= {"-h", "-t", "-j", "-o"}


def test_the_reason_for_waiting_is_passed_on(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="PENDING ReqNodeNotAvail, UnavailableNodes:n[1-2]\n")
    assert view_of(make_run()).reason == "ReqNodeNotAvail, UnavailableNodes:n[1-2]"


def test_an_ended_job_has_the_exit_code_that_scontrol_knows(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="FAILED NonZeroExitCode\n")
    fake_slurm.answer("scontrol", stdout=FAILED_RECORD)
    view = view_of(make_run())
    assert (view.state, view.word, view.exit_code) == ("ENDED", "FAILED", 12)


def test_one_empty_answer_does_not_flip_the_state(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="")
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    assert view_of(make_run()).state == "RUNNING"


def test_a_job_that_both_do_not_know_is_gone(fake_slurm, make_run):
    assert view_of(make_run()).state == "GONE"


def test_a_scheduler_that_does_not_answer_leaves_the_state_unknown(fake_slurm, make_run):
    for verb in ("squeue", "scontrol"):
        fake_slurm.answer(verb, stderr="Unable to contact slurm controller\n", exit_code=1)
    run = make_run(None)
    now = status(run)
    assert now.state == "UNKNOWN"
    assert "Unable to contact slurm controller" in now.reason


def test_without_slurm_on_path_a_verdict_still_tells(no_slurm, make_run):
    assert status(make_run(verdict("FAILED", 12))).state == "FAILED"
    assert status(make_run(None)).state == "UNKNOWN"
    assert "not on PATH" in status(make_run(None)).reason


def test_accounting_is_never_asked(fake_slurm, make_run):
    status(make_run(None))
    cancel(make_run(verdict("COMPLETED")))
    assert fake_slurm.calls("sacct") == []


def test_a_job_of_plain_sbatch_is_found_by_its_folder(fake_slurm, make_run):
    run = make_run(submitted=False)
    fake_slurm.answer("squeue", stdout=f"7 /elsewhere\n4321 {run.root}\n")
    fake_slurm.answer("squeue", stdout="PENDING Priority\n")
    now = status(run)
    assert (now.job_id, now.state) == ("4321", "PENDING")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(QueueError, match=r"handoff\.json") as error:
        open_run(tmp_path)
    assert error.value.exit_code == 5


def test_a_waiting_job_is_cancelled_at_once(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="PENDING Resources\n")
    fake_slurm.answer("squeue", stdout="CANCELLED None\n")
    fake_slurm.answer("scontrol", stdout="JobState=CANCELLED Reason=None ExitCode=0:0\n")
    assert cancel(make_run()).state == "CANCELLED"
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [["4100"]]


def test_a_running_job_is_asked_by_a_signal_to_its_agents(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    fake_slurm.answer("squeue", stdout="COMPLETING None\n")
    fake_slurm.answer("squeue", stdout="FAILED None\n")
    fake_slurm.answer("scontrol", stdout=FAILED_RECORD)
    assert cancel(make_run(None)).state == "CANCELLED"
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [["--signal=TERM", "4100"]]


def test_a_job_that_does_not_heed_the_signal_is_ended_by_force(fake_slurm, make_run, monkeypatch):
    monkeypatch.setattr("miles_hpc.launch.queue._CANCEL_MARGIN_S", -39.5)
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    cancel(make_run(None))
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [
        ["--signal=TERM", "4100"],
        ["4100"],
    ]


LOADED = ((Kind.MODEL_LOADED, {}),)


def test_cancel_with_save_asks_the_driver_first_and_signals_nobody_when_that_ends_it(
    fake_slurm, make_run
):
    run = make_run(None, events=LOADED)
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    fake_slurm.answer("squeue", stdout="FAILED None\n")
    fake_slurm.answer("scontrol", stdout=FAILED_RECORD)
    assert cancel(run, save=True).state == "CANCELLED"
    request = read_save_request(run.attempt(1), "4100-0")
    assert request is not None
    assert request.cause == "cancel"
    assert fake_slurm.calls("scancel") == []


def test_cancel_with_save_of_a_job_that_went_back_to_the_queue_takes_it_from_there(
    fake_slurm, make_run
):
    run = make_run(None, events=LOADED)
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    fake_slurm.answer("squeue", stdout="PENDING BeginTime\n")
    cancel(run, save=True)
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [["4100"]]


def test_cancel_with_save_of_a_driver_that_does_not_answer_is_a_cancel(
    fake_slurm, make_run, monkeypatch
):
    monkeypatch.setattr("miles_hpc.launch.queue._CANCEL_MARGIN_S", -39.5)
    monkeypatch.setattr("miles_hpc.launch.queue.save_grace_s", lambda pace, asked_s: 0.5)
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    cancel(make_run(None, events=LOADED), save=True)
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [
        ["--signal=TERM", "4100"],
        ["4100"],
    ]


def test_cancel_with_save_does_not_ask_before_the_model_is_loaded(fake_slurm, make_run):
    run = make_run(None)
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    fake_slurm.answer("squeue", stdout="RUNNING None\n")
    fake_slurm.answer("squeue", stdout="FAILED None\n")
    fake_slurm.answer("scontrol", stdout=FAILED_RECORD)
    cancel(run, save=True)
    assert not run.attempt(1).save_request.exists()
    assert [call["argv"] for call in fake_slurm.calls("scancel")] == [["--signal=TERM", "4100"]]


def test_an_ended_job_is_left_alone(fake_slurm, make_run):
    assert cancel(make_run(verdict("COMPLETED"))).state == "COMPLETED"
    assert fake_slurm.calls("scancel") == []


def test_a_refusal_of_scancel_is_told(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="PENDING Resources\n")
    fake_slurm.answer("scancel", stderr="Access/permission denied\n", exit_code=1)
    with pytest.raises(QueueError, match="permission denied"):
        cancel(make_run())


def test_there_is_nothing_to_cancel_without_a_job(fake_slurm, make_run):
    fake_slurm.answer("squeue", stdout="")
    with pytest.raises(QueueError, match="found no job"):
        cancel(make_run(submitted=False))


def test_an_unreachable_scheduler_stops_a_cancel(fake_slurm, make_run):
    for verb in ("squeue", "scontrol"):
        fake_slurm.answer(verb, stderr="Unable to contact slurm controller\n", exit_code=1)
    with pytest.raises(QueueError, match="Unable to contact"):
        cancel(make_run())


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def local_run(make_run, pid, ticks, *attempts, host=None):
    details = {"host": host or socket.gethostname(), "start_ticks": ticks}
    return make_run(*attempts, job_id=str(pid), cluster="local", details=details)


def test_a_local_job_is_its_controller_with_its_start_time(make_run, sleeper):
    ticks = process_start_ticks(sleeper.pid)
    assert view_of(local_run(make_run, sleeper.pid, ticks)).state == "RUNNING"
    assert view_of(local_run(make_run, sleeper.pid, ticks + 1)).state == "GONE"


def test_a_controller_that_nobody_has_reaped_is_dead(make_run, sleeper):
    ticks = process_start_ticks(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert process_start_ticks(sleeper.pid) is None
    assert view_of(local_run(make_run, sleeper.pid, ticks)).state == "GONE"


def test_a_local_job_of_another_host_is_not_guessed_at(make_run):
    view = view_of(local_run(make_run, 1, 1, host="elsewhere"))
    assert view.state == "UNKNOWN"
    assert "elsewhere" in view.reason


def test_cancelling_a_local_job_signals_its_controller_alone(make_run, sleeper):
    run = local_run(make_run, sleeper.pid, process_start_ticks(sleeper.pid), None)
    assert cancel(run).state == "CANCELLED"
    assert sleeper.wait(timeout=10) == -signal.SIGTERM
    assert "cancel_requested_s" in json.loads(run.job.read_text())


def test_a_reused_pid_is_never_signalled(make_run, sleeper):
    run = local_run(make_run, sleeper.pid, process_start_ticks(sleeper.pid) + 1, None)
    assert cancel(run).state == "FAILED"
    assert sleeper.poll() is None


def test_the_end_is_noticed_and_not_asked_again(fake_slurm, make_run):
    watch = EndWatch(make_run(verdict("COMPLETED")))
    assert watch()
    calls = len(fake_slurm.calls("squeue"))
    assert watch()
    assert len(fake_slurm.calls("squeue")) == calls
