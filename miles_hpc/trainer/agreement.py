"""Whether trainer and rollout engine are the same policy: their logprobs of the same tokens, compared every step.

A stale adapter, a wrong scale or a lost layer shows here long before the reward does. Knows numbers only.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FP32_MAX = 1e-4
BF16_MAX = 0.1
BF16_MEAN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The absolute difference of logprobs over all response tokens of a step, in nats."""

    max_diff: float
    mean_diff: float
    num_tokens: int


def compare_logprobs(
    rollout: Sequence[Sequence[float]], trainer: Sequence[Sequence[float]]
) -> Agreement:
    """Compare two sets of per-token logprobs, sample by sample; a value that is not finite makes the difference infinite.

    Raises:
        ValueError: if the two have different numbers of samples or of tokens in a sample.
    """
    differences = [
        abs(left - right)
        for left_row, right_row in zip(rollout, trainer, strict=True)
        for left, right in zip(left_row, right_row, strict=True)
    ]
    if not differences:
        return Agreement(max_diff=0.0, mean_diff=0.0, num_tokens=0)
    if not all(math.isfinite(value) for value in differences):
        return Agreement(max_diff=math.inf, mean_diff=math.inf, num_tokens=len(differences))
    return Agreement(
        max_diff=max(differences),
        mean_diff=math.fsum(differences) / len(differences),
        num_tokens=len(differences),
    )


def judge_agreement(
    agreement: Agreement, precision: Literal["fp32", "bf16"]
) -> tuple[Literal["ok", "alarm", "fail"], str]:
    """Return the verdict and its arithmetic.

    In fp32 a maximum above 1e-4 means two different policies: fail. In lower precision kernels differ by rounding, so a
    maximum above 0.1 or a mean above 0.03 is an alarm; a value that is not finite always fails.
    """
    found = f"max |d logprob| {agreement.max_diff:.3g}, mean {agreement.mean_diff:.3g} over {agreement.num_tokens} tokens"
    if not math.isfinite(agreement.max_diff):
        return "fail", f"{found}; expected finite logprobs"
    if precision == "fp32":
        verdict: Literal["ok", "fail"] = "ok" if agreement.max_diff <= FP32_MAX else "fail"
        return verdict, f"{found}; expected at most {FP32_MAX:g} in fp32"
    within = agreement.max_diff <= BF16_MAX and agreement.mean_diff <= BF16_MEAN
    limits = f"expected at most {BF16_MAX:g} and mean {BF16_MEAN:g} in bf16"
    return ("ok" if within else "alarm"), f"{found}; {limits}"
