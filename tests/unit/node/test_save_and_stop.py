"""When the driver is asked to save, what its answer is, and what the attempt then comes to."""

import os
import time
from pathlib import Path

import pytest

from miles_hpc.handoff import MemoryAlarm, SaveTrigger
from miles_hpc.node.sampling import make_sampler
from miles_hpc.node.save_and_stop import (
    TEARDOWN_S,
    SaveWatch,
    StoppedOnRequestError,
    watch_saves,
)
from miles_hpc.node.teardown import NodeResources
from miles_hpc.node.verdict import judge
from miles_hpc.run.events import EventLog, Kind, read_events
from miles_hpc.run.pace import Pace
from miles_hpc.run.save_request import DRIVER_EXIT_CODE, ask_to_save, read_save_request

pytestmark = pytest.mark.timeout(60)

EXITS = SaveTrigger(path="{attempt_dir}/requests/save_and_stop.json", done="exit")
REMOVES = SaveTrigger(path="{attempt_dir}/requests/miles_save", done="removed")


def make(make_context, *, left_s=None, pace=None, **changes):
    context = make_context(**{"save_trigger": EXITS, "max_attempts": 3, **changes})
    context.attempt.identity.touch()
    os.utime(context.attempt.identity, (1.0, 1.0))
    watch = SaveWatch(
        context=context,
        pace=pace or Pace(is_loaded=True),
        end_s=None if left_s is None else time.time() + left_s,
    )
    return context, watch


def save(context, step):
    folder = context.run.checkpoints / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "COMPLETE").touch()


def ask(context, cause="cancel", **more):
    ask_to_save(context.attempt, "7-0", cause, f"asked by {cause}", **more)


def ended(watch, code=None):
    with pytest.raises(StoppedOnRequestError) as caught:
        watch.look(code)
    return caught.value


def kinds(context):
    return [event["kind"] for event in read_events(context.events.path)]


def test_nothing_is_asked_while_there_is_time(make_context):
    context, watch = make(make_context, left_s=121.0, time_limit_s=7200.0)
    watch.look(None)
    watch.look(1)
    assert not context.attempt.save_request.exists()
    assert kinds(context) == []


def test_the_driver_is_asked_once_before_the_limit(make_context):
    context, watch = make(make_context, left_s=119.0, time_limit_s=7200.0)
    watch.look(None)
    watch.look(None)
    request = read_save_request(context.attempt, "7-0")
    assert request is not None
    assert request.cause == "time_limit"
    assert kinds(context) == ["save_requested"]


@pytest.mark.parametrize(
    ("limit_s", "floor_s", "pace", "lead_s"),
    [
        (172_800.0, None, Pace(), 120.0),
        (600.0, None, Pace(), 60.0),
        (120.0, None, Pace(), TEARDOWN_S),
        (600.0, 200.0, Pace(), 200.0),
        (600.0, 200.0, Pace(longest_step_s=40.0), 200.0),
        (600.0, None, Pace(longest_step_s=40.0), 40.0 + 60.0 + TEARDOWN_S),
        (600.0, None, Pace(longest_step_s=40.0, longest_save_s=5.0), 45.0 + TEARDOWN_S),
        (600.0, 200.0, Pace(longest_step_s=40.0, longest_save_s=5.0), 200.0),
    ],
)
def test_how_early_is_learned_with_a_floor(make_context, limit_s, floor_s, pace, lead_s):
    _, watch = make(make_context, pace=pace, time_limit_s=limit_s, save_before_limit_s=floor_s)
    assert watch.lead_s() == pytest.approx(lead_s)


def test_a_driver_that_saved_and_ended_has_answered(make_context):
    context, watch = make(make_context)
    ask(context)
    watch.look(None)
    save(context, 4)
    error = ended(watch, DRIVER_EXIT_CODE)
    assert str(error) == (
        "asked by cancel; the driver saved and stopped; a further attempt continues from step-4"
    )
    assert error.has_progress


def test_a_checkpoint_that_was_there_before_is_no_progress(make_context):
    context, watch = make(make_context)
    save(context, 4)
    os.utime(context.run.checkpoints / "step-4" / "COMPLETE", (0.5, 0.5))
    ask(context)
    watch.look(None)
    error = ended(watch, DRIVER_EXIT_CODE)
    assert "the last complete checkpoint is still step-4" in str(error)
    assert not error.has_progress


def test_the_same_exit_code_without_a_request_means_nothing(make_context):
    _, watch = make(make_context)
    watch.look(DRIVER_EXIT_CODE)


def test_a_driver_that_has_ended_is_not_asked(make_context):
    context, watch = make(make_context, left_s=1.0, time_limit_s=600.0)
    watch.look(0)
    assert not context.attempt.save_request.exists()


@pytest.mark.parametrize("code", [0, 12, -9])
def test_any_other_end_of_the_driver_is_its_own(make_context, code):
    context, watch = make(make_context)
    ask(context)
    watch.look(None)
    watch.look(code)


def test_a_driver_that_does_not_answer_has_its_time_and_no_more(make_context):
    context, watch = make(make_context, save_grace_s=0.2)
    ask(context)
    watch.look(None)
    time.sleep(0.25)
    error = ended(watch)
    assert "has not done so within 0 s; there is no complete checkpoint" in str(error)
    assert not error.has_progress


def test_before_the_model_is_loaded_there_is_nothing_to_wait_for(make_context):
    context, watch = make(make_context, pace=Pace())
    ask(context)
    assert "no model was loaded" in str(ended(watch))


def test_a_request_to_another_execution_is_none(make_context):
    context, watch = make(make_context)
    ask_to_save(context.attempt, "7-1", "cancel", "another restart")
    watch.look(None)
    assert kinds(context) == []


def test_the_first_request_stands_unless_a_cancel_replaces_it(make_context):
    context, watch = make(make_context)
    ask(context, "time_limit")
    ask(context, "memory_alarm")
    watch.look(None)
    request = read_save_request(context.attempt, "7-0")
    assert request is not None
    assert request.cause == "time_limit"
    ask(context, "cancel", replace=True)
    assert ended(watch, DRIVER_EXIT_CODE).request.cause == "cancel"
    assert kinds(context) == ["save_requested"]
    assert [p.name for p in context.attempt.save_request.parent.iterdir()] == ["save_and_stop.json"]


def test_an_engine_that_removes_its_trigger_has_saved(make_context):
    context, watch = make(make_context, save_trigger=REMOVES)
    trigger = Path(context.attempt.root) / "requests" / "miles_save"
    ask(context)
    watch.look(None)
    assert trigger.is_file()
    watch.look(None)
    trigger.unlink()
    assert "the driver saved and stopped" in str(ended(watch))


def test_a_driver_that_cannot_be_asked_is_ended_at_once(make_context):
    context, watch = make(make_context, save_trigger=None)
    ask(context)
    assert "has not done so" in str(ended(watch))


@pytest.mark.parametrize("trigger", [EXITS, REMOVES])
def test_a_request_that_cannot_be_written_ends_the_attempt_and_says_so(make_context, trigger):
    context, watch = make(make_context, left_s=10.0, time_limit_s=600.0, save_trigger=trigger)
    (context.attempt.root / "requests").write_text("a file")
    error = ended(watch)
    assert error.request.cause == "time_limit"
    assert "the driver could not be asked" in str(error)


def test_a_trigger_that_cannot_be_written_ends_the_attempt_and_says_so(make_context):
    trigger = SaveTrigger(path="{run_dir}/blocked/miles_save", done="removed")
    context, watch = make(make_context, save_trigger=trigger)
    (context.run.root / "blocked").write_text("a file")
    ask(context)
    assert "the driver could not be asked" in str(ended(watch))


def outcome_of(make_context, cause, *, saves=True, **changes):
    context, watch = make(make_context, **changes)
    ask(context, cause)
    watch.look(None)
    if saves:
        save(context, 4)
    return judge(context, ended(watch, DRIVER_EXIT_CODE))


def test_who_asked_decides_how_the_attempt_ends(make_context):
    cancelled = outcome_of(make_context, "cancel")
    assert (cancelled.state, cancelled.exit_code, cancelled.spends_attempt) == (
        "CANCELLED", 1, False,
    )  # fmt: skip


def test_an_alarm_is_a_failure_that_names_alarm_and_checkpoint(make_context):
    outcome = outcome_of(make_context, "memory_alarm")
    assert (outcome.state, outcome.exit_code, outcome.spends_attempt) == ("FAILED", 11, True)
    assert "asked by memory_alarm" in outcome.reason
    assert "a further attempt continues from step-4" in outcome.reason


def test_the_time_limit_requeues_without_spending_an_attempt(make_context):
    outcome = outcome_of(make_context, "time_limit", max_attempts=1)
    assert (outcome.state, outcome.exit_code, outcome.spends_attempt) == ("REQUEUED", 0, False)


def test_an_attempt_that_gained_nothing_spends_one(make_context):
    outcome = outcome_of(make_context, "time_limit", saves=False, max_attempts=2)
    assert (outcome.state, outcome.spends_attempt) == ("REQUEUED", True)


@pytest.mark.parametrize(
    ("changes", "saves", "words"),
    [
        ({"resume": "never"}, True, 'job.resume is "never"'),
        (
            {"max_attempts": 1},
            False,
            "attempts without success: 1, job.max_attempts = 1",
        ),
    ],
)
def test_a_job_that_may_not_go_on_is_a_failure_of_the_time_limit(
    make_context, changes, saves, words
):
    outcome = outcome_of(make_context, "time_limit", saves=saves, **changes)
    assert (outcome.state, outcome.exit_code) == ("FAILED", 14)
    assert words in outcome.reason


def test_a_signal_counts_before_a_request(make_context):
    context, watch = make(make_context)
    ask(context, "time_limit")
    watch.look(None)
    context.stop.signal_name = "SIGTERM"
    outcome = judge(context, ended(watch, DRIVER_EXIT_CODE))
    assert (outcome.state, outcome.spends_attempt) == ("CANCELLED", False)


def test_an_alarm_after_loading_asks_and_does_not_end_the_agent(make_context):
    context = make_context(
        node_index=1, memory_alarm=MemoryAlarm(host_bytes=1 << 20, action="stop"), nccl=None
    )
    context.rendezvous.open()
    context.rendezvous.announce_loaded()
    make_sampler(context, NodeResources(on_change=lambda folders: None)).look()
    context.stop.raise_if_requested()
    request = read_save_request(context.attempt, "7-0")
    assert request is not None
    assert request.cause == "memory_alarm"
    assert "n2: memory alarm: found" in request.reason


def test_the_watch_begins_with_how_long_earlier_attempts_saved(make_context):
    context = make_context()
    log = EventLog(context.run.events, "n1")
    for kind, fields in (
        (Kind.MODEL_LOADED, {}),
        (Kind.STEP, {"step": 1}),
        (Kind.PHASE, {"phase": "save"}),
        (Kind.CHECKPOINT_SAVED, {"step": 1}),
    ):
        log.append(kind, **fields)
    watch = watch_saves(context, Pace())
    assert watch.pace.longest_step_s is None
    assert watch.pace.longest_save_s is not None
    assert not watch.pace.is_loaded


def test_without_a_word_on_the_end_of_the_job_the_log_says_so(make_context, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    context = make_context(time_limit_s=60.0)
    assert watch_saves(context, Pace()).end_s is None
    [event] = [e for e in read_events(context.events.path) if e["kind"] == Kind.WARNING]
    assert "time limit" in str(event["message"])
