"""Who may start an attempt, and how the other nodes and `status` learn of it."""

import json
import threading
import time
from dataclasses import replace

import pytest

from miles_hpc.errors import NodeError, ResumeError
from miles_hpc.paths import RunDir
from miles_hpc.run.resume import (
    Identity,
    Verdict,
    find_attempt,
    latest_checkpoint,
    new_attempt,
    read_identity,
    read_verdict,
    refused_reason,
    spent_attempts,
    wait_for_attempt,
    write_verdict,
    write_whole,
)


def identity(job_id="7", restart_count=0):
    return Identity(
        job_id=job_id,
        restart_count=restart_count,
        cluster="slurm",
        head_node="n1",
        started_s=time.time(),
    )


def take(run, who, *, live=(), resume="auto", max_attempts=3):
    return new_attempt(
        run,
        who,
        resume=resume,
        max_attempts=max_attempts,
        is_live=lambda holder: holder.job_id in live,
    )


def verdict(state="FAILED", exit_code=12):
    return Verdict(
        state=state, exit_code=exit_code, driver_exit_code=-9, reason="it died", ended_s=1.5
    )


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path / "a run, with 'quotes' and é")


def test_first_attempt_is_number_one_and_says_whose_it_is(run):
    who = identity()
    attempt = take(run, who)
    assert attempt.number == 1
    assert read_identity(attempt) == who
    assert sorted(entry.name for entry in run.attempts_root.iterdir()) == ["1"]


def test_a_requeued_job_takes_the_next_attempt_and_nodes_find_the_one_of_their_restart(run):
    first = take(run, identity())
    second = take(run, identity(restart_count=1))
    assert (first.number, second.number) == (1, 2)
    assert find_attempt(run, "7", 0) == first
    assert find_attempt(run, "7", 1) == second
    assert find_attempt(run, "7", 2) is None


def test_a_second_live_job_is_refused_by_name_and_its_nodes_are_told(run):
    take(run, identity("7"))
    with pytest.raises(ResumeError, match="job 7 is running attempt 1") as error:
        take(run, identity("8"), live={"7"})
    assert error.value.exit_code == 13
    with pytest.raises(ResumeError, match="job 7 is running attempt 1"):
        find_attempt(run, "8", 0)
    assert "job 7" in (refused_reason(run, "8") or "")
    assert refused_reason(run, "7") is None
    assert [attempt.number for attempt in run.attempts()] == [1]


def test_a_dead_job_without_verdict_does_not_hold_the_folder(run):
    take(run, identity("7"))
    assert take(run, identity("8")).number == 2


def test_a_job_that_has_ended_is_not_asked_for(run):
    write_verdict(take(run, identity("7")), verdict())
    assert take(run, identity("8"), live={"7"}).number == 2


def test_resume_never_forbids_a_second_attempt(run):
    take(run, identity("7"), resume="never")
    with pytest.raises(ResumeError, match=r"resume is .never"):
        take(run, identity("7", 1), resume="never")


def test_attempts_are_counted(run):
    take(run, identity("7"), max_attempts=2)
    take(run, identity("7", 1), max_attempts=2)
    with pytest.raises(ResumeError, match="max_attempts = 2"):
        take(run, identity("7", 2), max_attempts=2)


@pytest.mark.parametrize("state", ["CANCELLED", "REQUEUED"])
def test_an_attempt_that_was_preempted_or_went_on_in_time_is_not_counted(run, state):
    for restart in range(3):
        attempt = take(run, identity("7", restart), max_attempts=1)
        write_verdict(attempt, replace(verdict(state, 0), spends_attempt=False))
    write_verdict(take(run, identity("7", 3), max_attempts=1), verdict("FAILED"))
    with pytest.raises(ResumeError, match="1 attempts have ended without success"):
        take(run, identity("7", 4), max_attempts=1)


def test_a_verdict_of_an_older_version_counts(run):
    attempt = take(run, identity())
    attempt.verdict.write_text(
        '{"state": "CANCELLED", "exit_code": 1, "driver_exit_code": null, "reason": "", "ended_s": 1}'
    )
    assert spent_attempts([attempt]) == 1


def test_a_second_step_of_one_allocation_is_refused(run):
    take(run, identity("7"))
    with pytest.raises(ResumeError, match="one step per allocation"):
        take(run, identity("7"))


def test_of_two_heads_that_start_at_once_exactly_one_gets_the_folder(run):
    barrier = threading.Barrier(8)
    outcomes = []

    def start(job_id):
        barrier.wait()
        try:
            outcomes.append(take(run, identity(job_id), live={str(k) for k in range(8)}).number)
        except ResumeError:
            outcomes.append(None)

    threads = [threading.Thread(target=start, args=(str(k),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes, key=str) == [1, *[None] * 7]


def test_an_unwritable_folder_is_a_resume_error(tmp_path):
    (tmp_path / "run").write_text("a file, not a folder")
    with pytest.raises(ResumeError, match="writable file system"):
        take(RunDir(tmp_path / "run"), identity())


def test_waiting_ends_when_the_head_has_its_attempt(run):
    threading.Timer(0.2, take, args=(run, identity())).start()
    assert wait_for_attempt(run, "7", 0, deadline_s=10).number == 1


def test_waiting_names_the_job_at_its_deadline(run):
    with pytest.raises(NodeError, match=r"no attempt of job 7 \(restart 0\) after 0.2 s"):
        wait_for_attempt(run, "7", 0, deadline_s=0.2)


def test_a_verdict_survives_the_disk(run):
    attempt = take(run, identity())
    assert read_verdict(attempt) is None
    write_verdict(attempt, verdict())
    assert read_verdict(attempt) == verdict()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "FAILED"}', '{"state": "DONE", "exit_code": 0}']
)
def test_a_verdict_that_is_none_is_not_taken_for_one(run, text):
    attempt = take(run, identity())
    attempt.verdict.write_text(text)
    assert read_verdict(attempt) is None


def test_whole_files_leave_nothing_beside_them(tmp_path):
    write_whole(tmp_path / "token", "secret", mode=0o600)
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "missing" / "token", "secret")


def test_only_complete_checkpoints_exist_and_steps_are_numbers(run):
    assert latest_checkpoint(run) is None
    for name, complete in (
        ("step-2", True),
        ("step-10", True),
        ("step-11", False),
        ("step-x", True),
    ):
        (run.checkpoints / name).mkdir(parents=True)
        if complete:
            (run.checkpoints / name / "COMPLETE").write_text(json.dumps({}))
    assert latest_checkpoint(run) == run.checkpoints / "step-10"
