"""AdamW whose fp32 weights and moments live on disk and pass through memory one bucket at a time during the step.

A bucket is a run of elements, cut wherever it is full, so that the memory it takes does not depend on the largest
parameter. For a model whose optimizer state (12 bytes a parameter) fits nowhere else; the price is reading and writing all
of it each step. Knows no model and no process group; a checkpoint is for the same topology only, and says so.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from miles_hpc.errors import ResumeError
from miles_hpc.trainer.disk_file import DiskFile, DiskOffloadError, IoMode
from miles_hpc.trainer.disk_layout import Piece, StreamLayout, round_up
from miles_hpc.trainer.disk_offload import as_bytes
from miles_hpc.trainer.disk_staging import Slot, Staging, read_spans, run_workers, write_spans

_FP32_BYTES = 4
_PARTS = 3  # main weight, first moment, second moment
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW's own; `learning_rate` may be changed between steps on the optimizer."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """What one step read and wrote, and the seconds it took in all."""

    read_bytes: int
    written_bytes: int
    seconds: float


class StreamedAdam:
    """The optimizer of one rank.

    Gradients are taken from `main_grad` where a parameter has one, else from `grad`; a parameter without is left alone.
    The first step starts from the parameters themselves, without reading.

    Args:
        parameters: (name, parameter) in an order that is the same in every run; contiguous, on `device`.
        path: this rank's state file, made here and removed by `close`.
        bucket_bytes: memory of one bucket (weights and moments together).
        chunk_bytes: host staging takes two of them.
    """

    def __init__(  # noqa: PLR0913 - one object with independent settings, all keyword-only
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        settings: AdamSettings,
        *,
        path: Path,
        device: torch.device,
        bucket_bytes: int,
        chunk_bytes: int,
        mode: IoMode = "auto",
    ) -> None:
        self.settings = settings
        self.learning_rate = settings.learning_rate
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._steps = [0] * len(parameters)
        for name, parameter in parameters:
            if not parameter.is_contiguous():
                raise DiskOffloadError(
                    f"streamed optimizer: parameter {name} with strides {parameter.stride()} is not contiguous; expected "
                    "contiguous parameters. Make it contiguous before the optimizer is built."
                )
        part_bytes = max(bucket_bytes // _PARTS // 4096, 1) * 4096
        numels = [parameter.numel() * _FP32_BYTES for parameter in self._parameters]
        self._buckets = StreamLayout.of(numels, part_bytes)
        self._written = [False] * self._buckets.num_blocks
        self._staging = Staging(chunk_bytes, device)
        self._resident = torch.zeros(
            _PARTS * part_bytes // _FP32_BYTES, dtype=torch.float32, device=device
        )
        self._file = DiskFile(path, mode=mode)
        try:
            self._file.preallocate(self.state_bytes)
        except DiskOffloadError:
            self.close()
            raise

    @property
    def state_bytes(self) -> int:
        """Size of the state file."""
        return round_up(_PARTS * self._buckets.block_bytes) * self._buckets.num_blocks

    @property
    def bucket_bytes(self) -> int:
        """Memory of the one resident bucket."""
        return self._resident.numel() * _FP32_BYTES

    def zero_grad(self) -> None:
        """Forget the gradients that `backward` left."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> StepTraffic:
        """Update every parameter that has a gradient.

        Raises:
            DiskOffloadError: the state is then partly updated; continue from a checkpoint.
        """
        started = time.perf_counter()
        gradients = [_gradient(parameter) for parameter in self._parameters]
        read = written = 0
        for bucket in range(self._buckets.num_blocks):
            if self._written[bucket]:
                read += self._read(bucket)
            else:
                self._start(bucket)
            pieces = [
                piece for piece in self._buckets.pieces(bucket) if gradients[piece.span] is not None
            ]
            self._update(bucket, pieces, gradients)
            written += self._write(bucket)
        self._file.finish_writes()
        self._steps = [
            steps + (gradient is not None)
            for steps, gradient in zip(self._steps, gradients, strict=True)
        ]
        return StepTraffic(
            read_bytes=read, written_bytes=written, seconds=time.perf_counter() - started
        )

    def _parts(self, bucket: int) -> Tensor:
        """Return the resident bucket as [part, element]: main weight, first moment, second moment."""
        numel = self._buckets.payload_bytes(bucket) // _FP32_BYTES
        return self._resident[: _PARTS * numel].view(_PARTS, numel)

    def _start(self, bucket: int) -> None:
        parts = self._parts(bucket)
        parts.zero_()
        for piece in self._buckets.pieces(bucket):
            parts[0, _place(piece)].copy_(self._parameters[piece.span].view(-1)[_source(piece)])

    def _update(
        self, bucket: int, pieces: Sequence[Piece], gradients: Sequence[Tensor | None]
    ) -> None:
        parts = self._parts(bucket)
        cut = [_place(piece) for piece in pieces]
        adamw(
            [parts[0, place] for place in cut],
            list(_cut_gradients(pieces, gradients)),
            [parts[1, place] for place in cut],
            [parts[2, place] for place in cut],
            [],
            [torch.tensor(float(self._steps[piece.span])) for piece in pieces],
            foreach=False,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=self.learning_rate,
            weight_decay=self.settings.weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )
        for piece, place in zip(pieces, cut, strict=True):
            self._parameters[piece.span].view(-1)[_source(piece)].copy_(parts[0, place])

    def _stream(self, bucket: int) -> tuple[list[Tensor], StreamLayout, int]:
        num_bytes = _PARTS * self._buckets.payload_bytes(bucket)
        flat = as_bytes(self._resident.untyped_storage())[:num_bytes]
        layout = StreamLayout.of([num_bytes], self._staging.block_bytes)
        return [flat], layout, bucket * round_up(_PARTS * self._buckets.block_bytes)

    def _read(self, bucket: int) -> int:
        spans, layout, at = self._stream(bucket)
        read_spans(spans, layout, self._file, self._staging, at=at)
        return layout.total_bytes

    def _write(self, bucket: int) -> int:
        spans, layout, at = self._stream(bucket)
        write_spans(spans, layout, self._file, self._staging, at=at)
        self._written[bucket] = True
        return layout.total_bytes

    def save(self, folder: Path, *, rank: int, topology: Mapping[str, int]) -> int:
        """Copy the state to `folder`, where nothing of this rank may be yet; return the bytes.

        `topology` is what must be the same to load it again, such as {"tp": 2, "pp": 4, "dp": 1}.
        """
        copy = DiskFile(_state_path(folder, rank), mode="buffered")
        try:
            copy.preallocate(self.state_bytes)
            self._copy(self._file, copy)
            copy.finish_writes()
        except DiskOffloadError:
            copy.close()
            raise
        copy.close(keep=True)
        manifest = self._manifest(rank, topology) | {
            "steps": self._steps,
            "written": self._written,
        }
        _manifest_path(folder, rank).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        return self.state_bytes

    def load(self, folder: Path, *, rank: int, topology: Mapping[str, int]) -> None:
        """Continue from the state in `folder`.

        Raises:
            ResumeError: if it was saved by another topology, for other parameters or with other buckets, or is not whole.
        """
        path = _manifest_path(folder, rank)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            steps, written = list(found.pop("steps")), list(found.pop("written"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(
                f"{path}: {error}; expected the optimizer state of rank {rank}. Continue from another checkpoint."
            ) from error
        for key, expected in self._manifest(rank, topology).items():
            if found.get(key) != expected:
                raise ResumeError(
                    f"{path}: {key} was {_short(found.get(key))} when saved, expected {_short(expected)} now. Streamed "
                    "optimizer state continues on the same topology and model only: restore [parallel] and "
                    "[cluster], or start a new run from the weights."
                )
        copy = DiskFile.of_existing(_state_path(folder, rank))
        try:
            if copy.num_bytes != self.state_bytes:
                raise ResumeError(
                    f"{copy.path}: found {copy.num_bytes} bytes, expected {self.state_bytes}. Continue from another "
                    "checkpoint."
                )
            self._copy(copy, self._file)
            copy.finish_reads()
            self._file.finish_writes()
        finally:
            copy.close(keep=True)
        self._steps, self._written = steps, written

    def _manifest(self, rank: int, topology: Mapping[str, int]) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "rank": rank,
            "topology": dict(topology),
            "bucket_bytes": self.bucket_bytes,
            "parameters": [
                [name, list(parameter.shape)]
                for name, parameter in zip(self._names, self._parameters, strict=True)
            ],
        }

    def _copy(self, source: DiskFile, target: DiskFile) -> None:
        layout = StreamLayout.of([self.state_bytes], self._staging.block_bytes)

        def carry(slot: Slot, block: int) -> None:
            memory = slot.memory(layout.payload_bytes(block))
            source.read_block(memory, block * layout.block_bytes)
            target.write_block(memory, block * layout.block_bytes)

        run_workers(carry, layout.num_blocks, self._staging)

    def close(self) -> None:
        """Remove the state file and free the bucket and the staging memory."""
        self._file.close()
        self._staging.close()


def _gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    gradient = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _cut_gradients(pieces: Sequence[Piece], gradients: Sequence[Tensor | None]) -> Iterator[Tensor]:
    for piece in pieces:
        gradient = gradients[piece.span]
        assert gradient is not None, "pieces without gradient were left out"
        yield gradient.reshape(-1)[_source(piece)].float()


def _source(piece: Piece) -> slice:
    """Elements of the parameter."""
    first = piece.span_offset_bytes // _FP32_BYTES
    return slice(first, first + piece.num_bytes // _FP32_BYTES)


def _place(piece: Piece) -> slice:
    """Elements of each part of the bucket."""
    first = piece.block_offset_bytes // _FP32_BYTES
    return slice(first, first + piece.num_bytes // _FP32_BYTES)


def _state_path(folder: Path, rank: int) -> Path:
    return folder / f"optimizer-rank{rank:05d}.bin"


def _manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"optimizer-rank{rank:05d}.json"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
