"""What the events of a driver say about its steps and saves."""

import json

import pytest

from miles_hpc.run.pace import Pace, past_pace
from miles_hpc.run.save_request import save_grace_s


def pace_of(*events):
    pace = Pace()
    for time_s, kind, fields in events:
        pace.note({"time_s": time_s, "kind": kind, **fields})
    return pace


def test_steps_last_from_end_to_end_and_saves_from_phase_to_checkpoint():
    pace = pace_of(
        (10.0, "model_loaded", {}),
        (12.0, "checkpoint_loaded", {}),
        (20.0, "step", {"step": 1}),
        (24.0, "phase", {"phase": "save"}),
        (27.0, "checkpoint_saved", {}),
        (32.0, "step", {"step": 2}),
        (34.0, "step", {"step": 3}),
        (35.0, "phase", {"phase": "save"}),
    )
    assert (pace.is_loaded, pace.longest_step_s, pace.longest_save_s) == (True, 12.0, 3.0)


def test_a_later_attempt_knows_the_pace_of_the_earlier_ones_and_not_the_time_between(tmp_path):
    lines = [
        {"time_s": 1.0, "kind": "model_loaded"},
        {"time_s": 4.0, "kind": "step"},
        {"time_s": 5.0, "kind": "phase", "phase": "save"},
        {"time_s": 500.0, "kind": "attempt_started"},
        {"time_s": 520.0, "kind": "checkpoint_saved"},
        {"time_s": 521.0, "kind": "step"},
        {"time_s": 522.0, "kind": "phase", "phase": "save"},
        {"time_s": 524.0, "kind": "checkpoint_saved"},
    ]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    past = past_pace(events)
    assert (past.is_loaded, past.longest_step_s, past.longest_save_s) == (False, 3.0, 2.0)
    assert past_pace(tmp_path / "absent").longest_step_s is None


def test_without_events_nothing_is_known():
    pace = pace_of((1.0, "phase", {"phase": "load"}), (2.0, "step", {}))
    assert (pace.is_loaded, pace.longest_step_s, pace.longest_save_s) == (False, None, None)
    Pace().note({"kind": "step"})


@pytest.mark.parametrize(
    ("pace", "asked_s", "grace_s"),
    [
        (Pace(), None, 300.0),
        (Pace(), 7.0, 7.0),
        (Pace(longest_step_s=1.0, longest_save_s=1.0), None, 60.0),
        (Pace(longest_step_s=100.0, longest_save_s=50.0), None, 300.0),
        (Pace(longest_step_s=100.0), None, 200.0),
    ],
)
def test_a_driver_has_twice_what_its_steps_and_saves_took(pace, asked_s, grace_s):
    assert save_grace_s(pace, asked_s) == grace_s
