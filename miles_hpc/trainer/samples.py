"""What one rollout yields: samples with their tokens, logprobs and rewards.

Plain values that travel between the driver, the rollout engines and the trainer ranks. Knows no tensor and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response to one prompt.

    Attributes:
        group: index of the prompt inside the step; the samples of one prompt share it.
        prompt_ids: prompt tokens.
        response_ids: sampled tokens, the end-of-sequence token included when it was sampled.
        rollout_logprobs: log-probability of each response token under the rollout engine, in nats.
        finished: the response ended by itself and not at the token limit.
    """

    group: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """A sample as the update sees it.

    Attributes:
        old_logprobs: log-probability of each response token under the trainer before the update, in nats.
        advantage: group-normalised advantage, the same for every token of the response.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    old_logprobs: tuple[float, ...]
    advantage: float


def train_samples(
    samples: Sequence[Sample], old: Sequence[Sequence[float]], advantages: Sequence[float]
) -> list[TrainSample]:
    """Return what the trainer learns from: each sample with its old logprobs and its advantage."""
    return [
        TrainSample(
            prompt_ids=sample.prompt_ids,
            response_ids=sample.response_ids,
            old_logprobs=tuple(logprobs),
            advantage=advantage,
        )
        for sample, logprobs, advantage in zip(samples, old, advantages, strict=True)
    ]
