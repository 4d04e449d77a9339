"""Log-probabilities of given tokens from hidden states, without ever holding the logits of a whole batch.

The output layer is frozen, so the gradient of a token's log-probability with respect to its hidden state is a vector of
hidden size that one pass over the logits gives as well; the backward pass then needs neither logits nor recomputation.

Legend: T response tokens, H hidden, V rows of the output layer on this rank. Knows no loss and no model.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# fp32 logits alive at a time.
LOGITS_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """This rank's rows of the output layer.

    Attributes:
        weight: [V, H], without rows that only pad the vocabulary.
        start: token of the first row.
        group: the tensor parallel group; None when it has one rank.
    """

    weight: Tensor
    start: int
    group: dist.ProcessGroup | None


class _Context(Protocol):
    """What autograd passes to both halves of a function."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        hidden_TH: Tensor,
        targets_T: Tensor,
        shard: VocabularyShard,
        temperature: float,
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[0]
        weight, group = shard.weight, shard.group
        rows = max(1, LOGITS_BYTES // (4 * max(1, weight.shape[0])))
        logprobs_T = torch.empty(len(targets_T), dtype=torch.float32, device=hidden_TH.device)
        slope_TH = torch.empty_like(hidden_TH) if needs_grad else None
        local_T = targets_T - shard.start
        inside_T = (local_T >= 0) & (local_T < weight.shape[0])
        local_T = torch.where(inside_T, local_T, 0)
        for begin in range(0, len(targets_T), rows):
            part = slice(begin, begin + rows)
            logits = (hidden_TH[part] @ weight.t()).float().div_(temperature)
            local, inside = local_T[part, None], inside_T[part]
            peak = logits.amax(-1)
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            logits.sub_(peak[:, None])
            picked = torch.where(inside, logits.gather(1, local)[:, 0], 0.0)
            total = logits.exp_().sum(-1)
            if group is not None:
                both = torch.stack((picked, total))
                dist.all_reduce(both, group=group)
                picked, total = both
            logprobs_T[part] = picked - total.log()
            if slope_TH is not None:
                # d logprob / d logits = one-hot - softmax
                error = logits.div_(-total[:, None])
                error.scatter_add_(1, local, inside[:, None].float())
                slope = (error.to(weight.dtype) @ weight).div_(temperature)
                if group is not None:
                    dist.all_reduce(slope, group=group)
                slope_TH[part] = slope
        if slope_TH is not None:
            ctx.save_for_backward(slope_TH)
        return logprobs_T

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (slope_TH,) = ctx.saved_tensors
        return (grads[0][:, None] * slope_TH).to(slope_TH.dtype), None, None, None


def token_logprobs(
    hidden_TH: Tensor, targets_T: Tensor, shard: VocabularyShard, temperature: float
) -> Tensor:
    """Return the fp32 log-probability of each target under softmax(hidden @ weight^T / temperature), in nats.

    The same on every rank of the tensor parallel group. Gradients reach `hidden_TH` only: the output layer is frozen.

    Args:
        hidden_TH: normalised hidden states, each at the position before its target.
        targets_T: token ids.
        shard: this rank's part of the output layer.
        temperature: the rollout's sampling temperature, so that both sides speak of one distribution.
    """
    assert not shard.weight.requires_grad, "the output layer is frozen"
    return _TokenLogprobs.apply(hidden_TH, targets_T, shard, temperature)  # type: ignore[no-any-return, no-untyped-call]
