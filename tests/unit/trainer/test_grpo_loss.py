"""The loss against the formula written out for one token, and against hand-made numbers."""

import math

import pytest
import torch

from miles_hpc.spec.job import TrainTable
from miles_hpc.trainer.loss import LossInputs, batch_weight, grpo_loss, token_weights

pytestmark = pytest.mark.trainer

TRAIN = TrainTable(num_steps=1, learning_rate=1e-3, clip_low=0.2, clip_high=0.28)


def inputs(new, old, advantages, weights=None, reference=None) -> LossInputs:
    return LossInputs(
        logprobs=torch.tensor(new, requires_grad=True),
        old_logprobs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        token_weights=torch.ones(len(new)) if weights is None else weights,
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )


def test_the_first_update_has_the_policy_gradient():
    given = inputs([-1.0, -2.0], [-1.0, -2.0], [1.5, -0.5])
    sums = grpo_loss(given, TRAIN)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(-1.0)
    torch.testing.assert_close(given.logprobs.grad, torch.tensor([-1.5, 0.5]))
    assert (sums.clipped, sums.drift) == (0, 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # too far up: clip_high
        (0.5, 1.0, -0.5, -0.5),  # a good token that fell is not clipped
        (0.5, -1.0, 0.8, 0.0),  # too far down: clip_low
        (1.5, -1.0, 1.5, 1.5),  # a bad token that rose is not clipped
    ],
)
def test_each_side_of_the_clip(ratio, advantage, loss, slope):
    given = inputs([-1.0 + math.log(ratio)], [-1.0], [advantage])
    sums = grpo_loss(given, TRAIN)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(loss, rel=1e-5)
    assert given.logprobs.grad.item() == pytest.approx(slope, rel=1e-5)
    assert sums.clipped == (slope == 0)


def test_kl_is_never_negative_and_pulls_to_the_reference():
    train = TRAIN.model_copy(update={"kl_coef": 0.5})
    given = inputs([-1.0, -3.0], [-1.0, -3.0], [0.0, 0.0], reference=[-2.0, -1.0])
    sums = grpo_loss(given, train)
    sums.loss.backward()
    expected = (math.exp(-1) + 1 - 1) + (math.exp(2) - 2 - 1)
    assert sums.kl.item() == pytest.approx(expected, rel=1e-5)
    assert sums.loss.item() == pytest.approx(0.5 * expected, rel=1e-5)
    assert given.logprobs.grad[0] > 0 > given.logprobs.grad[1]


def test_weights_by_token_and_by_sample():
    lengths = torch.tensor([4, 0, 1])
    assert token_weights(lengths, per_sample=False).tolist() == [1.0] * 5
    assert token_weights(lengths, per_sample=True).tolist() == [0.25] * 4 + [1.0]
    assert batch_weight(lengths, per_sample=False) == 5
    assert batch_weight(lengths, per_sample=True) == 2
