"""LoRA on megatron-core's column and row parallel linears, with one adapter for each Hugging Face projection.

`linear_qkv` and `linear_fc1` hold several projections; each keeps its own A and B, so that any subset can be adapted and
the export to PEFT is exact. With rank r, scale s and tensor parallel shards, x @ A^T @ B^T * s becomes

    column (qkv, fc1):  A whole on every tp rank, B split by rows;   h = x A^T, then B
    row (proj, fc2):    A split by columns, B whole on every rank;   h = sum over tp of x A^T, then B

A and B are fp32 whatever the base's type: an update of 1e-4 of a weight is lost in bf16. A starts from a seed of its own
for every layer and projection and is cut from the whole matrix, so that all layouts start from the same adapter; B is 0.

Knows no optimizer and no file.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from miles_hpc.errors import PlanError
from miles_hpc.spec.job import JobSpec, LoraTable
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.grid import Grid
from miles_hpc.trainer.model import PolicyModel
from miles_hpc.trainer.pieces import PROJECTIONS, Piece, projection_shapes, split_evenly

_ROW = ("o_proj", "down_proj")
# Attribute path in a megatron layer -> the projections it holds, in the order of its output.
_LINEARS = {
    ("self_attention", "linear_qkv"): ("q_proj", "k_proj", "v_proj"),
    ("self_attention", "linear_proj"): ("o_proj",),
    ("mlp", "linear_fc1"): ("gate_proj", "up_proj"),
    ("mlp", "linear_fc2"): ("down_proj",),
}


def initial_a(seed: int, layer: int, projection: str, shape: tuple[int, int]) -> Tensor:
    """Return the whole A [rank, in] of one adapter: uniform within 1 / sqrt(in), as PEFT starts it."""
    digest = hashlib.sha256(f"{seed}/{layer}/{projection}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class Adapter(nn.Module):
    """A and B of one projection, this rank's shard."""

    def __init__(self, a: Tensor, b: Tensor, *, row: bool, sequence_parallel: bool) -> None:
        super().__init__()
        self.a, self.b, self.row = nn.Parameter(a), nn.Parameter(b), row
        # Megatron counts a parameter's gradient once in the norm when these say that ranks hold copies of it.
        set_tensor_model_parallel_attributes(self.a, is_parallel=row, dim=1, stride=1)
        set_tensor_model_parallel_attributes(self.b, is_parallel=not row, dim=0, stride=1)
        # With sequence parallelism a whole matrix sees only this rank's tokens; finalize_model_grads sums over tp.
        whole = self.b if row else self.a
        whole.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


class LoraLinear(nn.Module):
    """A megatron linear with adapters added to its output; called like the linear itself."""

    def __init__(
        self, base: nn.Module, parts: dict[str, Adapter | int], *, groups: int, scale: float
    ) -> None:
        """Wrap `base`.

        Args:
            base: a megatron column or row parallel linear.
            parts: for each projection in the order of the output, its adapter, or its local width when it has none.
            groups: the output is interleaved by this many groups (key/value groups for qkv, else 1).
            scale: alpha / rank.
        """
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict(
            {name: part for name, part in parts.items() if isinstance(part, Adapter)}
        )
        self.widths = {
            name: part.b.shape[0] if isinstance(part, Adapter) else part
            for name, part in parts.items()
        }
        self.groups, self.scale, self.enabled = groups, scale, True
        self.row = any(name in _ROW for name in parts)
        self.sequence_parallel = bool(cast(TransformerConfig, base.config).sequence_parallel)

    def _delta(self, x: Tensor, adapter: Adapter) -> Tensor:
        # bf16 activations meet A and B rounded to bf16; the fp32 matrices receive the gradient.
        a, b = adapter.a.to(x.dtype), adapter.b.to(x.dtype)
        low = F.linear(x, a)
        if self.row and self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self.row:
            low = reduce_from_tensor_model_parallel_region(low)
        elif self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low)
        else:
            low = copy_to_tensor_model_parallel_region(low)
        return F.linear(low, b)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor | None]:
        """Return the linear's output with the adapters' added, and its bias."""
        output, bias = self.base(x, *args, **kwargs)
        if not self.enabled:
            return output, bias
        deltas = [
            self._delta(x, cast(Adapter, self.adapters[name])).view(
                *output.shape[:-1], self.groups, -1
            )
            if name in self.adapters
            else output.new_zeros((*output.shape[:-1], self.groups, width // self.groups))
            for name, width in self.widths.items()
        ]
        delta = deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1)
        return torch.add(output, delta.flatten(-2), alpha=self.scale), bias


def _adapter(spec: JobSpec, grid: Grid, layer: int, name: str, lora: LoraTable) -> Adapter:
    rows, columns = projection_shapes(spec.model)[name]
    a = initial_a(spec.train.seed, layer, name, (lora.rank, columns))
    row = name in _ROW
    if row:
        start, stop = split_evenly(columns, grid)
        a = a[:, start:stop].contiguous()
    b = torch.zeros(rows if row else rows // grid.tp, lora.rank)
    return Adapter(
        a.to(grid.device),
        b.to(grid.device),
        row=row,
        sequence_parallel=spec.parallel.sequence_parallel and grid.tp > 1,
    )


def add_lora(policy: PolicyModel, spec: JobSpec, grid: Grid) -> None:
    """Wrap the targeted linears of every layer of this stage.

    Raises:
        PlanError: if a name in `lora.target_modules` is no projection.
    """
    lora = spec.lora
    assert lora is not None, "build_model refuses a spec without [lora]"
    unknown = sorted(set(lora.target_modules) - PROJECTIONS.keys())
    if unknown or not lora.target_modules:
        raise PlanError(
            f"lora.target_modules: found {', '.join(unknown) or 'none'}; expected one or more of "
            f"{', '.join(PROJECTIONS)}. Correct the list."
        )
    shapes = projection_shapes(spec.model)
    for layer in policy.decoder.layers:
        for (parent, child), names in _LINEARS.items():
            if not set(names) & set(lora.target_modules):
                continue
            parts: dict[str, Adapter | int] = {
                name: _adapter(spec, grid, layer.layer_number - 1, name, lora)
                if name in lora.target_modules
                else shapes[name][0] // grid.tp
                for name in names
            }
            owner = getattr(layer, parent)
            groups = spec.model.num_query_groups // grid.tp if child == "linear_qkv" else 1
            wrapped = LoraLinear(
                getattr(owner, child), parts, groups=groups, scale=lora.alpha / lora.rank
            )
            setattr(owner, child, wrapped)


def _pieces_of(
    adapter: Adapter, unit: int, prefix: str, shape: tuple[int, int], grid: Grid
) -> tuple[Piece, Piece]:
    rows, columns = shape
    rank = adapter.a.shape[0]
    start, stop = split_evenly(columns if adapter.row else rows, grid)
    return (
        Piece(
            unit=unit,
            name=f"{prefix}.lora_A.weight",
            shape=(rank, columns),
            parameter=adapter.a,
            axis=1 if adapter.row else None,
            start=start,
            stop=stop,
        ),
        Piece(
            unit=unit,
            name=f"{prefix}.lora_B.weight",
            shape=(rows, rank),
            parameter=adapter.b,
            axis=None if adapter.row else 0,
            start=start,
            stop=stop,
        ),
    )


def adapter_pieces(policy: PolicyModel, model: ModelTable, grid: Grid) -> tuple[Piece, ...]:
    """Return the pieces of this rank's adapters under their PEFT names."""
    shapes = projection_shapes(model)
    found: list[Piece] = []
    for layer in policy.decoder.layers:
        index = layer.layer_number - 1
        for parent, child in _LINEARS:
            wrapped = getattr(getattr(layer, parent), child)
            if not isinstance(wrapped, LoraLinear):
                continue
            for name, adapter in wrapped.adapters.items():
                prefix = f"base_model.model.model.layers.{index}.{PROJECTIONS[name]}"
                found.extend(_pieces_of(cast(Adapter, adapter), index, prefix, shapes[name], grid))
    return tuple(found)


@contextmanager
def adapters_off(policy: nn.Module) -> Iterator[None]:
    """Run the base alone: the reference policy of a KL term."""
    wrapped = [module for module in policy.modules() if isinstance(module, LoraLinear)]
    for module in wrapped:
        module.enabled = False
    try:
        yield
    finally:
        for module in wrapped:
            module.enabled = True
