import math

import pytest

from miles_hpc.trainer.agreement import Agreement, compare_logprobs, judge_agreement


def agreement(max_diff, mean_diff=0.0):
    return Agreement(max_diff=max_diff, mean_diff=mean_diff, num_tokens=10)


def test_the_largest_and_the_mean_difference_run_over_all_tokens_of_all_samples():
    found = compare_logprobs([[-1.0, -2.0], [-3.0]], [[-1.0, -2.3], [-3.0]])
    assert found.num_tokens == 3
    assert found.max_diff == pytest.approx(0.3)
    assert found.mean_diff == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("left", "right"), [([[-1.0]], [[-1.0, -2.0]]), ([[-1.0]], [[-1.0], [-2.0]])]
)
def test_samples_and_tokens_that_do_not_pair_up_are_refused(left, right):
    with pytest.raises(ValueError, match="zip"):
        compare_logprobs(left, right)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_logprob_that_is_not_finite_fails_in_every_precision(bad, precision):
    assert judge_agreement(compare_logprobs([[bad]], [[-1.0]]), precision)[0] == "fail"


@pytest.mark.parametrize(
    ("found", "precision", "verdict"),
    [
        (agreement(1e-4), "fp32", "ok"),
        (agreement(1.1e-4), "fp32", "fail"),
        (agreement(0.1, 0.03), "bf16", "ok"),
        (agreement(0.11, 0.001), "bf16", "alarm"),
        (agreement(0.05, 0.031), "bf16", "alarm"),
        (agreement(5.0, 2.0), "bf16", "alarm"),
    ],
)
def test_the_limits_are_those_of_the_precision(found, precision, verdict):
    assert judge_agreement(found, precision)[0] == verdict


def test_the_verdict_carries_its_arithmetic():
    _, text = judge_agreement(agreement(0.25, 0.1), "fp32")
    assert "0.25" in text
    assert "0.0001" in text
