"""Samples into right-padded micro-batches, and results back into the order of the samples.

Samples are sorted by length first, so that a micro-batch pads little. Knows no model; plain tensors on the CPU.

Legend: B rows (samples) of a micro-batch, S padded length, T its response tokens, row after row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PAD_TOKEN = 0


class TokenPair(Protocol):
    """A prompt and its response; `Sample` and `TrainSample` are such pairs."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Prompt tokens, at least one."""

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Response tokens, perhaps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass.

    Attributes:
        indices: the samples' places in the list that was packed, row by row.
        tokens_BS: prompt, response, padding.
        lengths_B: response tokens of each row.
        rows_T / columns_T: where the token before each response token stands: its output predicts that token.
        targets_T: the response tokens.
    """

    indices: tuple[int, ...]
    tokens_BS: Tensor
    lengths_B: Tensor
    rows_T: Tensor
    columns_T: Tensor
    targets_T: Tensor


def split_micro_batches(
    lengths: Sequence[int], *, micro_batch_size: int | None, max_tokens: int | None
) -> list[tuple[int, ...]]:
    """Group sample indices, longest first, into micro-batches.

    Args:
        lengths: prompt plus response tokens of each sample.
        micro_batch_size: rows of a micro-batch; 1 when neither limit is given.
        max_tokens: most tokens of a micro-batch, padding included; a longer sample is alone in its micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[tuple[int, ...]] = []
    while order:
        # The first of the rest is the longest, so it sets the padded length.
        rows = (
            max(1, max_tokens // lengths[order[0]])
            if max_tokens is not None
            else micro_batch_size or 1
        )
        batches.append(tuple(order[:rows]))
        order = order[rows:]
    return batches


def pack(pairs: Sequence[TokenPair], indices: Sequence[int], *, multiple: int = 1) -> MicroBatch:
    """Pad the samples at `indices` on the right to one length, a multiple of `multiple`."""
    chosen = [pairs[index] for index in indices]
    longest = max(len(pair.prompt_ids) + len(pair.response_ids) for pair in chosen)
    tokens = torch.full((len(chosen), -(-longest // multiple) * multiple), PAD_TOKEN)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for row, pair in enumerate(chosen):
        prompt, response = len(pair.prompt_ids), len(pair.response_ids)
        tokens[row, : prompt + response] = torch.tensor(pair.prompt_ids + pair.response_ids)
        rows += [row] * response
        columns += range(prompt - 1, prompt + response - 1)
        targets += pair.response_ids
    return MicroBatch(
        indices=tuple(indices),
        tokens_BS=tokens,
        lengths_B=torch.tensor([len(pair.response_ids) for pair in chosen]),
        rows_T=torch.tensor(rows, dtype=torch.long),
        columns_T=torch.tensor(columns, dtype=torch.long),
        targets_T=torch.tensor(targets, dtype=torch.long),
    )


def unpack(batch: MicroBatch, values_T: Tensor) -> dict[int, tuple[float, ...]]:
    """Return the values of each sample's response tokens, by the sample's place in the packed list."""
    parts = torch.split(values_T.cpu(), batch.lengths_B.tolist())
    return {index: tuple(part.tolist()) for index, part in zip(batch.indices, parts, strict=True)}
