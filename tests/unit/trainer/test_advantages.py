import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.trainer.advantages import group_advantages


def test_a_group_is_centred_and_divided_by_its_unbiased_standard_deviation():
    found = group_advantages([0.0, 1.0, 1.0, 2.0], [0, 0, 0, 0], normalise=True)
    deviation = math.sqrt(2 / 3)
    expected = [-1 / deviation, 0.0, 0.0, 1 / deviation]
    assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(found, expected, strict=True))


def test_without_normalisation_rewards_are_only_centred():
    assert group_advantages([0.0, 1.0, 5.0, 5.0], [0, 0, 1, 1], normalise=False) == [
        -0.5,
        0.5,
        0,
        0,
    ]


def test_groups_do_not_touch_each_other_and_need_not_be_neighbours():
    apart = group_advantages([0.0, 3.0, 1.0, 9.0], [0, 1, 0, 1], normalise=True)
    together = group_advantages([0.0, 1.0, 3.0, 9.0], [0, 0, 1, 1], normalise=True)
    assert apart == [together[0], together[2], together[1], together[3]]


def test_a_group_of_equal_rewards_and_a_group_of_one_get_zeros():
    # 0.1 three times: the mean is not exactly 0.1 in floating point, so only a test of equality gives zeros.
    assert group_advantages([0.1, 0.1, 0.1, 7.0], [0, 0, 0, 1], normalise=True) == [0.0] * 4


@given(
    st.lists(st.floats(-10, 10), min_size=2, max_size=16).filter(lambda r: max(r) - min(r) > 1e-3),
    st.booleans(),
)
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards, normalise):
    found = group_advantages(rewards, [0] * len(rewards), normalise=normalise)
    assert abs(sum(found)) < 1e-6
    order = sorted(range(len(rewards)), key=lambda i: rewards[i])
    assert all(found[a] <= found[b] for a, b in itertools.pairwise(order))
