"""Asked to save and stop on a real Slurm, with a stub driver: in time before the limit, by the alarm, by `cancel --save`; and
ended from outside at the worst moments, without loss of a checkpoint."""

import json
import os
import subprocess
import sys

import pytest

from miles_hpc.handoff import MemoryAlarm, SaveTrigger
from tests.slurm.jobs import (
    REPOSITORY,
    assert_nothing_left,
    events_of,
    outputs,
    submit,
    verdict_of,
    wait_for,
    write_run,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

NATIVE = SaveTrigger(path="{attempt_dir}/requests/save_and_stop.json", done="exit")
START = """
    import os, pathlib, sys, time
    from miles_hpc.run.events import EventLog, Kind

    log = EventLog(pathlib.Path(os.environ["MILES_HPC_EVENTS"]), os.environ["MILES_HPC_NODE"])
    attempt = pathlib.Path(sys.argv[1])
    request = attempt / "requests" / "save_and_stop.json"
    checkpoints = attempt.parent.parent / "checkpoints"
    done = max((int(p.parent.name[5:]) for p in checkpoints.glob("step-*/COMPLETE")), default=0)
    log.append(Kind.MODEL_LOADED)
    print("continues from step", done, flush=True)

    def save(step, complete=True):
        folder = checkpoints / f"step-{step}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "COMPLETE").touch()
"""
ANSWERS = """
    if attempt.name == "1":
        (attempt / "running").touch()
        while not request.exists():
            time.sleep(0.05)
        save(done + 1)
        sys.exit(75)
"""
IGNORES = """
    if attempt.name == "1":
        (attempt / "running").touch()
        time.sleep(600)
"""
LIMIT = {"time_limit_s": 120.0, "save_before_limit_s": 85.0, "save_trigger": NATIVE}
IN_TIME = "--time=2 --requeue"


def make_run(tmp_path, driver, **changes):
    return write_run(
        tmp_path / "run", START + driver, **{"num_nodes": 1, "save_trigger": NATIVE, **changes}
    )


def cancel_and_save(slurm, run) -> dict:
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    done = subprocess.run(
        [sys.executable, "-m", "miles_hpc", "cancel", "--save", "--json", str(run.root)],
        env={**slurm.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{outputs(run)}"
    return json.loads(done.stdout)


def wait_until_running(run, number=1):
    look = (run.attempt(number).root / "running").exists
    wait_for(look, f"running driver of attempt {number}", run, timeout_s=100)


def test_before_the_limit_the_job_saves_requeues_itself_and_goes_on(slurm, tmp_path):
    # One attempt is allowed: one that saved before the limit spends none.
    run = make_run(tmp_path, ANSWERS, **LIMIT, num_nodes=2, max_attempts=1)
    record = slurm.wait_for_job(submit(slurm, run, options=IN_TIME), timeout_s=200)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), outputs(run)
    first = verdict_of(run, 1)
    assert (first.state, first.exit_code, first.driver_exit_code) == ("REQUEUED", 0, 75)
    assert "job.time_limit ends in" in first.reason
    assert "a further attempt continues from step-1" in first.reason
    assert verdict_of(run, 2).state == "COMPLETED"
    assert run.attempt(2).driver_log.read_text() == "continues from step 1\n"
    [asked] = [event for event in events_of(run) if event["kind"] == "save_requested"]
    assert asked["cause"] == "time_limit"
    assert_nothing_left(run)


def test_a_driver_that_ignores_the_request_is_ended_in_time_and_goes_on_from_what_it_has(
    slurm, tmp_path
):
    driver = IGNORES.replace('(attempt / "running")', 'save(1); (attempt / "running")')
    run = make_run(tmp_path, driver, **LIMIT, save_grace_s=3.0)
    record = slurm.wait_for_job(submit(slurm, run, options=IN_TIME), timeout_s=200)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), outputs(run)
    first = verdict_of(run, 1)
    assert first.state == "REQUEUED"
    assert "has not done so within 3 s; a further attempt continues from step-1" in first.reason
    assert run.attempt(2).driver_log.read_text() == "continues from step 1\n"
    assert_nothing_left(run)


@pytest.mark.parametrize(
    ("driver", "changes", "options", "words"),
    [
        (ANSWERS, {"resume": "never"}, "--time=2 --no-requeue", 'job.resume is "never"'),
        (ANSWERS, {}, "--time=2 --no-requeue", "scontrol requeue"),
        (IGNORES, {"max_attempts": 1, "save_grace_s": 3.0}, IN_TIME, "job.max_attempts = 1"),
    ],
    ids=["resume-never", "slurm-refuses", "nothing-gained"],
)
def test_a_job_that_does_not_go_on_says_why_with_the_code_of_the_time_limit(
    slurm, tmp_path, driver, changes, options, words
):
    run = make_run(tmp_path, driver, **{**LIMIT, **changes})
    record = slurm.wait_for_job(submit(slurm, run, options=options), timeout_s=150)
    assert (record["ExitCode"], record["Restarts"]) == ("14:0", "0"), outputs(run)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.exit_code) == ("FAILED", 14)
    assert "The job is not requeued: " in verdict.reason
    assert words in verdict.reason
    assert ("step-1" in verdict.reason) == (driver is ANSWERS)
    assert_nothing_left(run)


def test_the_memory_alarm_saves_before_it_stops(slurm, tmp_path):
    driver = ANSWERS.replace("while not", 'held = b"x" * (1600 << 20)\n        while not')
    alarm = MemoryAlarm(host_bytes=1500 << 20, action="stop")
    run = make_run(tmp_path, driver, memory_alarm=alarm)
    record = slurm.wait_for_job(submit(slurm, run), timeout_s=150)
    assert record["ExitCode"] == "11:0", outputs(run)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.driver_exit_code) == ("FAILED", 75)
    assert "memory alarm: found" in verdict.reason
    assert "the driver saved and stopped; a further attempt continues from step-1" in verdict.reason
    assert_nothing_left(run)


def test_cancel_with_save_saves_first_and_warning_signals_change_nothing(slurm, tmp_path):
    run = make_run(tmp_path, ANSWERS)
    job_id = submit(slurm, run)
    wait_until_running(run)
    # What --signal=USR1@N would send to the step; the driver has no handler for them.
    for name in ("USR1", "USR2"):
        assert slurm.run("scancel", f"--signal={name}", job_id).returncode == 0
    told = cancel_and_save(slurm, run)
    assert told["state"] == "CANCELLED", told
    assert told["driver_exit_code"] == 75
    assert "cancel --save; the driver saved and stopped" in told["reason"]
    slurm.wait_for_job(job_id)
    assert (run.checkpoints / "step-1" / "COMPLETE").is_file()
    assert_nothing_left(run)


def test_cancel_with_save_does_not_wait_for_ever(slurm, tmp_path):
    run = make_run(tmp_path, IGNORES, save_grace_s=2.0)
    job_id = submit(slurm, run)
    wait_until_running(run)
    told = cancel_and_save(slurm, run)
    assert told["state"] == "CANCELLED", told
    assert "has not done so within 2 s; there is no complete checkpoint" in told["reason"]
    slurm.wait_for_job(job_id)
    assert_nothing_left(run)


@pytest.mark.parametrize("moment", ["bring-up", "save"])
def test_preemption_at_a_bad_moment_spends_no_attempt_and_loses_no_checkpoint(
    slurm, tmp_path, moment
):
    driver = IGNORES.replace(
        '(attempt / "running")', 'save(1); save(2, complete=False); (attempt / "running")'
    )
    run = make_run(tmp_path, driver, num_nodes=2, max_attempts=1)
    job_id = submit(slurm, run, options="--requeue")
    if moment == "save":
        wait_until_running(run)
    else:
        wait_for(lambda: run.attempt(1).identity.exists(), "attempt", run)
    assert slurm.run("scontrol", "requeue", job_id).returncode == 0
    wait_for(lambda: run.attempt(2).root.exists(), "second attempt", run, timeout_s=90)
    record = slurm.wait_for_job(job_id)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), outputs(run)
    first = verdict_of(run, 1)
    assert (first.state, first.spends_attempt) == ("CANCELLED", False)
    assert (run.attempt(1).driver_log.exists()) == (moment == "save")
    steps = 1 if moment == "save" else 0
    assert run.attempt(2).driver_log.read_text() == f"continues from step {steps}\n"
    assert_nothing_left(run)
