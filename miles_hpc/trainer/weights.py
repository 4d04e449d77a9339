"""Base weights between a Hugging Face safetensors folder and this rank's Megatron shard.

Reads only the slices that the rank needs. Knows no adapter; which slice goes where stands in `trainer.pieces`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from miles_hpc.errors import PlanError
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.grid import Grid
from miles_hpc.trainer.model import PolicyModel
from miles_hpc.trainer.pieces import HEAD, Piece, base_pieces, expected_names, gather_whole

# Mapped pages of an open file count as this process's memory; closing the file gives them back.
_REOPEN_BYTES = 256 * 2**20


class _Stored(Protocol):
    """One tensor in an open safetensors file; indexing reads."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Tensor: ...


class CheckpointReader:
    """Slices of the tensors in a Hugging Face safetensors folder.

    Raises:
        PlanError: from every method, when the folder or a file in it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._mapped_bytes = 0
        index = folder / "model.safetensors.index.json"
        try:
            if index.is_file():
                self.files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            else:
                with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
                    self.files = dict.fromkeys(file.keys(), "model.safetensors")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise PlanError(
                f"{folder}: {error}; expected a Hugging Face folder with model.safetensors or its index. "
                "Check model.hf_checkpoint, or convert the checkpoint to safetensors."
            ) from error

    def _slice(self, name: str) -> _Stored:
        if self._mapped_bytes > _REOPEN_BYTES:
            self._open.clear()
            self._mapped_bytes = 0
        file = self.files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt")
        stored: _Stored = self._open[file].get_slice(name)
        return stored

    def read(self, piece: Piece) -> Tensor:
        """Return the slice of one tensor that `piece` asks for, in the checkpoint's type."""
        if piece.name not in self.files:
            raise PlanError(
                f"{self.folder}: no tensor {piece.name}; expected shape {list(piece.shape)}. "
                "Make the spec's [model] table match the checkpoint."
            )
        try:
            stored = self._slice(piece.name)
            shape = tuple(stored.get_shape())
            if shape != piece.shape:
                raise PlanError(
                    f"{self.folder}: {piece.name} has shape {list(shape)}, but the spec's [model] table gives "
                    f"{list(piece.shape)}. Make the table match the checkpoint."
                )
            value = (
                stored[:, piece.start : piece.stop]
                if piece.axis == 1
                else stored[piece.start : piece.stop]
                if piece.axis == 0
                else stored[:]
            )
        except (OSError, SafetensorError) as error:
            raise PlanError(
                f"{self.folder}: {piece.name}: {error}; expected a readable safetensors file. Copy the checkpoint again."
            ) from error
        self._mapped_bytes += value.nbytes
        return value


def load_base(policy: PolicyModel, model: ModelTable, grid: Grid, folder: Path) -> int:
    """Fill this rank's base weights from `folder` and return their bytes.

    Raises:
        PlanError: if a tensor is missing, has another shape, or is one that this model has no place for.
    """
    reader = CheckpointReader(folder)
    # A tied checkpoint may store the output layer again; rotary frequencies are computed.
    ignored = {HEAD} if model.tie_word_embeddings else set()
    surplus = [
        name
        for name in sorted(reader.files.keys() - expected_names(model) - ignored)
        if not name.endswith("rotary_emb.inv_freq")
    ]
    if surplus:
        raise PlanError(
            f"{folder}: {len(surplus)} tensors have no place in a {model.family} of the spec's shape, first "
            f"{', '.join(surplus[:3])}; expected none. Make the spec's [model] table match the checkpoint."
        )
    pieces = base_pieces(policy, model, grid)
    with torch.no_grad():
        for piece in pieces:
            if piece.name.endswith(("embed_tokens.weight", "lm_head.weight")):
                piece.parameter.zero_()  # rows that only pad the vocabulary
            piece.store(reader.read(piece))
    return sum(parameter.nbytes for parameter in policy.parameters())


def export_base(policy: PolicyModel, model: ModelTable, grid: Grid) -> Iterator[tuple[str, Tensor]]:
    """Yield the base weights under their Hugging Face names on rank 0; all ranks must run it to the end.

    A tied output layer is yielded once, as the embedding.
    """
    pieces = base_pieces(policy, model, grid)
    if not grid.is_first_stage:
        pieces = tuple(piece for piece in pieces if not piece.name.endswith("embed_tokens.weight"))
    yield from gather_whole(pieces, grid, range(-1, model.num_layers + 1))
