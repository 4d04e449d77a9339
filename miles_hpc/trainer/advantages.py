"""GRPO's group-normalised advantages, one number a response. Knows neither tokens nor models."""

import math
from collections.abc import Sequence

_EPSILON = 1e-6


def group_advantages(
    rewards: Sequence[float], groups: Sequence[int], *, normalise: bool
) -> list[float]:
    """Return the advantage of each sample against the samples of the same prompt.

    With n samples in the group, mean m and standard deviation s (the unbiased one, n - 1):

        A_i = (r_i - m) / (s + 1e-6)    if normalise
        A_i = r_i - m                   else (Dr. GRPO)

    A group whose rewards are all equal, a group of one included, gets zeros: it has nothing to teach.

    Args:
        rewards: reward of each sample.
        groups: group of each sample, in the same order; a group's samples need not be neighbours.
        normalise: divide by the standard deviation.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1 (arXiv:2402.03300); Liu et al. 2025 (arXiv:2503.20783) for the centred form.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [rewards[index] for index in indices]
        if min(values) == max(values):
            continue
        mean = math.fsum(values) / len(values)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        scale = math.sqrt(variance) + _EPSILON if normalise else 1.0
        for index, value in zip(indices, values, strict=True):
            advantages[index] = (value - mean) / scale
    return advantages
