import time

import pytest

from miles_hpc.trainer.metrics import PhaseClock, StepCounts, step_fields, time_left_s


def counts(**changes):
    values = {
        "rewards": [0.0, 1.0],
        "scores": [0.0, 1.0],
        "response_lengths": [3, 7],
        "num_finished": 1,
        "num_zero_groups": 0,
    }
    return StepCounts(**{**values, **changes})


def test_a_step_reports_means_totals_and_seconds_by_phase():
    clock = PhaseClock()
    with clock.measure("rollout"):
        time.sleep(0.02)
    fields = step_fields(counts(), clock)
    assert fields["reward"] == fields["score"] == fields["finished_share"] == 0.5
    assert fields["response_tokens"] == 10
    assert 0.02 <= fields["rollout_s"] <= fields["step_s"]
    assert fields["rollout_tokens_per_s"] == pytest.approx(10 / fields["rollout_s"])


def test_a_phase_entered_twice_adds_up_and_one_that_fails_still_counts():
    clock = PhaseClock()
    with clock.measure("train"):
        time.sleep(0.01)
    with pytest.raises(KeyError), clock.measure("train"):
        time.sleep(0.01)
        raise KeyError
    assert clock.seconds["train"] >= 0.02


@pytest.mark.parametrize(
    ("seconds", "left", "expected"),
    [([], 5, 0.0), ([9.0], 2, 18.0), ([9.0, 1.0, 2.0], 3, 6.0), ([4.0, 1.0, 2.0, 3.0], 2, 5.0)],
)
def test_time_left_is_the_median_step_times_the_steps_left(seconds, left, expected):
    assert time_left_s(seconds, left) == expected
