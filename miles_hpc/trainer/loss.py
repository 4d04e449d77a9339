"""The GRPO loss as pure functions of token tensors.

Legend: T response tokens of one micro-batch, all samples one after another. Knows no model, batch layout or parallelism.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_hpc.spec.job import TrainTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of one micro-batch is made of; every tensor is fp32 [T].

    Attributes:
        logprobs: of the policy being trained, with gradient.
        old_logprobs: of the policy before the update.
        advantages: the sample's advantage, at each of its tokens.
        token_weights: what `token_weights` returns.
        reference_logprobs: of the base without adapter; None without a KL term.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    reference_logprobs: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Sums over one micro-batch; divided by the weight of the global batch, not of the micro-batch.

    Attributes:
        loss: scalar with gradient.
        clipped: tokens whose ratio was clipped against the sign of their advantage.
        kl: sum of the KL estimate, unweighted; 0 without a reference.
        drift: sum of |ratio - 1|.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    drift: Tensor


def token_weights(lengths: Tensor, *, per_sample: bool) -> Tensor:
    """Return each token's weight in the summed loss, [sum of lengths].

    Args:
        lengths: response tokens of each sample.
        per_sample: every sample counts 1, shared by its tokens; otherwise every token counts 1.
    """
    per_token = 1.0 / lengths.clamp(min=1) if per_sample else torch.ones_like(lengths)
    return per_token.float().repeat_interleave(lengths)


def batch_weight(lengths: Tensor, *, per_sample: bool) -> int:
    """Return what the summed loss is divided by: samples with a response, or response tokens."""
    return int((lengths > 0).sum() if per_sample else lengths.sum())


def grpo_loss(inputs: LossInputs, train: TrainTable) -> LossSums:
    """Return the clipped policy loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), plus kl_coef times the KL.

    r = exp(logprob - old logprob); KL is the estimator exp(d) - d - 1 with d = reference - policy, which is never
    negative.

    Source: PPO (arXiv:1707.06347) eq. 7; GRPO (arXiv:2402.03300) eq. 3 and 4; clip-higher: DAPO (arXiv:2503.14476) eq. 8.
    """
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
    clipped_ratio = ratio.clamp(1 - train.clip_low, 1 + train.clip_high)
    gain = torch.minimum(ratio * inputs.advantages, clipped_ratio * inputs.advantages)
    loss = -gain
    kl = torch.zeros_like(loss)
    if inputs.reference_logprobs is not None:
        gap = inputs.reference_logprobs - inputs.logprobs
        kl = torch.exp(gap) - gap - 1
        loss = loss + train.kl_coef * kl
    with torch.no_grad():
        clipped = (clipped_ratio * inputs.advantages < ratio * inputs.advantages).sum()
        drift = (ratio - 1).abs().sum()
    return LossSums(
        loss=(loss * inputs.token_weights).sum(),
        clipped=clipped,
        kl=kl.detach().sum(),
        drift=drift,
    )
