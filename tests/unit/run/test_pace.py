"""What the events of a driver say about its steps and saves."""

import pytest

from miles_hpc.run.pace import Pace
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
