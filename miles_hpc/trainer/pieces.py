"""Pieces: which slice of which Hugging Face tensor stands where in this rank's Megatron parameters.

One table serves loading, exporting the base and exporting adapters. Megatron keeps `linear_qkv` as, for each key/value
group, the group's query heads, then its key head, then its value head; `linear_fc1` as gate rows, then up rows. Each of
the parts is one contiguous range of the tensor parallel axis of its Hugging Face tensor.

Knows no file format and no adapter arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.grid import Grid
from miles_hpc.trainer.model import PolicyModel

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Part of a fused or plain projection -> the module's name in a Hugging Face layer.
PROJECTIONS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One contiguous slice of a Hugging Face tensor and its place in a local parameter.

    Attributes:
        unit: -1 for the embedding, the layer's index, or `num_layers` for what follows the layers.
        name: the Hugging Face (or PEFT) name of the whole tensor; `shape` is the shape it has there.
        axis: axis of the Hugging Face tensor that is split; None when every tp rank holds all of it.
        start: first index on `axis` that this rank holds; `stop` is one past the last.
        parameter: the local tensor; seen as [groups, rows of a group, ...] this piece is rows `first` to `last` of each.
    """

    unit: int
    name: str
    shape: tuple[int, ...]
    parameter: Tensor
    axis: int | None = None
    start: int = 0
    stop: int = 0
    groups: int = 1
    first: int = 0
    last: int | None = None

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of this rank's slice of the Hugging Face tensor."""
        shape = list(self.shape)
        if self.axis is not None:
            shape[self.axis] = self.stop - self.start
        return tuple(shape)

    def view(self) -> Tensor:
        """Return the place in the local parameter, as a view [groups, rows, ...]."""
        data = self.parameter.detach()
        return data.view(self.groups, -1, *data.shape[1:])[:, self.first : self.last]

    def store(self, value: Tensor) -> None:
        """Write this rank's slice of the Hugging Face tensor into the parameter."""
        place = self.view()
        place.copy_(value.reshape(place.shape))

    def fetch(self) -> Tensor:
        """Return this rank's slice of the Hugging Face tensor, on the CPU."""
        return self.view().reshape(self.slice_shape).cpu().contiguous()


def split_evenly(size: int, grid: Grid) -> tuple[int, int]:
    """Return this tp rank's range of an axis of `size`, which tp divides."""
    part = size // grid.tp
    return grid.tp_rank * part, (grid.tp_rank + 1) * part


def projection_shapes(model: ModelTable) -> dict[str, tuple[int, int]]:
    """Return the [out, in] shape of each projection of a layer, by its name in `PROJECTIONS`."""
    query = model.num_attention_heads * model.head_dim
    key = model.num_query_groups * model.head_dim
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
        "gate_proj": (ffn, hidden),
        "up_proj": (ffn, hidden),
        "down_proj": (hidden, ffn),
    }


def _weight(module: nn.Module) -> Tensor:
    """Return the weight of a megatron linear, or of the linear under an adapter."""
    return cast(Tensor, getattr(module, "base", module).weight)


def _layer_pieces(
    layer: TransformerLayer, index: int, model: ModelTable, grid: Grid
) -> Iterator[Piece]:
    prefix = f"model.layers.{index}."
    shapes = projection_shapes(model)
    queries = model.num_attention_heads // model.num_query_groups * model.head_dim
    dim, groups = model.head_dim, model.num_query_groups // grid.tp
    ffn = model.ffn_hidden_size // grid.tp
    attention, mlp = layer.self_attention, layer.mlp
    places = (
        ("q_proj", attention.linear_qkv, 0, groups, 0, queries),
        ("k_proj", attention.linear_qkv, 0, groups, queries, queries + dim),
        ("v_proj", attention.linear_qkv, 0, groups, queries + dim, queries + 2 * dim),
        ("o_proj", attention.linear_proj, 1, 1, 0, None),
        ("gate_proj", mlp.linear_fc1, 0, 1, 0, ffn),
        ("up_proj", mlp.linear_fc1, 0, 1, ffn, 2 * ffn),
        ("down_proj", mlp.linear_fc2, 1, 1, 0, None),
    )
    for name, module, axis, count, first, last in places:
        start, stop = split_evenly(shapes[name][axis], grid)
        yield Piece(
            unit=index,
            name=f"{prefix}{PROJECTIONS[name]}.weight",
            shape=shapes[name],
            parameter=_weight(module),
            axis=axis,
            start=start,
            stop=stop,
            groups=count,
            first=first,
            last=last,
        )
    norms = [
        ("input_layernorm", layer.input_layernorm),
        ("post_attention_layernorm", layer.pre_mlp_layernorm),
    ]
    if model.qk_layernorm:
        norms.append(("self_attn.q_norm", attention.q_layernorm))
        norms.append(("self_attn.k_norm", attention.k_layernorm))
    for name, module in norms:
        weight = module.weight
        yield Piece(
            unit=index,
            name=f"{prefix}{name}.weight",
            shape=tuple(weight.shape),
            parameter=weight,
        )


def _vocabulary_piece(name: str, unit: int, weight: Tensor, model: ModelTable, grid: Grid) -> Piece:
    rows = weight.shape[0]
    start = min(grid.tp_rank * rows, model.vocab_size)
    stop = min(start + rows, model.vocab_size)
    return Piece(
        unit=unit,
        name=name,
        shape=(model.vocab_size, model.hidden_size),
        parameter=weight,
        axis=0,
        start=start,
        stop=stop,
        last=stop - start,
    )


def base_pieces(policy: PolicyModel, model: ModelTable, grid: Grid) -> tuple[Piece, ...]:
    """Return the pieces of this rank's base weights; a tied last stage holds a second copy of the embedding."""
    found: list[Piece] = []
    if grid.is_first_stage:
        weight = policy.embedding.word_embeddings.weight
        found.append(_vocabulary_piece(EMBEDDING, -1, weight, model, grid))
    for layer in policy.decoder.layers:
        found.extend(_layer_pieces(layer, layer.layer_number - 1, model, grid))
    if grid.is_last_stage:
        end = model.num_layers
        norm = policy.decoder.final_layernorm.weight
        found.append(Piece(unit=end, name=FINAL_NORM, shape=tuple(norm.shape), parameter=norm))
        if not model.tie_word_embeddings:
            found.append(_vocabulary_piece(HEAD, end, policy.output_layer.weight, model, grid))
        elif not grid.is_first_stage:
            weight = policy.output_weight()
            found.append(_vocabulary_piece(EMBEDDING, end, weight, model, grid))
    return tuple(found)


def expected_names(model: ModelTable) -> frozenset[str]:
    """Return the name of every tensor that a Hugging Face checkpoint of this shape has."""
    layer = [f"{name}.weight" for name in PROJECTIONS.values()]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    if model.qk_layernorm:
        layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    names = {f"model.layers.{i}.{name}" for i in range(model.num_layers) for name in layer}
    names |= {EMBEDDING, FINAL_NORM} | (set() if model.tie_word_embeddings else {HEAD})
    return frozenset(names)


def gather_whole(pieces: Sequence[Piece], grid: Grid, units: range) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of `units` whole on rank 0 and nothing elsewhere; all ranks must run it to the end.

    Travels unit by unit over gloo, so that rank 0 holds one layer at a time and not the model.
    """
    for unit in units:
        mine: list[tuple[str, int, tuple[int, ...], int | None, Tensor]] = []
        if grid.dp_rank == 0:
            mine = [
                (piece.name, piece.start, piece.shape, piece.axis, piece.fetch())
                for piece in pieces
                if piece.unit == unit and (piece.axis is not None or grid.tp_rank == 0)
            ]
        parts: list[Any] | None = [None] * grid.world_size if grid.rank == 0 else None
        dist.gather_object(mine, parts, dst=0, group=grid.control)
        whole: dict[str, Tensor] = {}
        for name, start, shape, axis, value in (entry for part in parts or () for entry in part):
            if axis is None:
                whole[name] = value
                continue
            tensor = whole.setdefault(name, torch.empty(shape, dtype=value.dtype))
            tensor.narrow(axis, start, value.shape[axis]).copy_(value)
        yield from whole.items()
