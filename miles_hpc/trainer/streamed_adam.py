"""AdamW whose fp32 weights and moments live on disk and pass through memory one bucket at a time during the step.

A bucket is a run of elements, cut wherever it is full, so that the memory it takes does not depend on the largest
parameter. For a model whose optimizer state (12 bytes a parameter) fits nowhere else; the price is reading and writing all
of it each step. The file has room for two states: a step reads one and writes the other, so that one that fails is taken
back. Knows no model and no process group; a checkpoint is for the same topology only, and says so.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from miles_hpc.errors import ResumeError
from miles_hpc.trainer.disk_file import DiskFile, DiskOffloadError, IoMode
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES, Piece, StreamLayout, round_up
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
        bucket_bytes: memory of one bucket (weights and moments together); less when the whole state is smaller.
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
        numels = [parameter.numel() * _FP32_BYTES for parameter in self._parameters]
        part_bytes = max(bucket_bytes // _PARTS // ALIGNMENT_BYTES, 1) * ALIGNMENT_BYTES
        part_bytes = min(part_bytes, max(round_up(sum(numels)), ALIGNMENT_BYTES))
        self._buckets = StreamLayout.of(numels, part_bytes)
        self._started = False
        self._side = 0  # which of the two states in the file is the current one
        self._staging = Staging(chunk_bytes, device)
        self._resident = torch.zeros(
            _PARTS * part_bytes // _FP32_BYTES, dtype=torch.float32, device=device
        )
        self._file = DiskFile(path, mode=mode)
        try:
            self._file.preallocate(self.file_bytes)
        except DiskOffloadError:
            self.close()
            raise

    @property
    def state_bytes(self) -> int:
        """Size of one state on disk."""
        return round_up(_PARTS * self._buckets.block_bytes) * self._buckets.num_blocks

    @property
    def file_bytes(self) -> int:
        """Size of the file: the state as it is, and the one that a step writes."""
        return 2 * self.state_bytes

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
            DiskOffloadError: weights and state are then as they were before the step.
        """
        started = time.perf_counter()
        gradients = [_gradient(parameter) for parameter in self._parameters]
        read = written = changed = 0
        try:
            for bucket in range(self._buckets.num_blocks):
                if self._started:
                    read += self._read(bucket, self._side)
                else:
                    self._start(bucket)
                    # What a failure later in this step takes the weights back from.
                    written += self._write(bucket, self._side)
                changed = bucket + 1
                self._update(bucket, gradients)
                written += self._write(bucket, 1 - self._side)
            self._file.finish_writes()
        except DiskOffloadError as error:
            self._take_back(changed, error)
            raise
        self._started, self._side = True, 1 - self._side
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

    def _take_back(self, num_buckets: int, failure: DiskOffloadError) -> None:
        """Give the parameters of the first buckets the weights of the current state again."""
        try:
            for bucket in range(num_buckets):
                self._read(bucket, self._side)
                self._publish(bucket, list(self._buckets.pieces(bucket)))
        except DiskOffloadError as error:
            raise DiskOffloadError(
                f"{failure} Taking the step back failed too, so the weights are partly updated: continue from the last "
                f"checkpoint. ({error})"
            ) from failure

    def _publish(self, bucket: int, pieces: Sequence[Piece]) -> None:
        main = self._parts(bucket)[0]
        for piece in pieces:
            self._parameters[piece.span].view(-1)[_source(piece)].copy_(main[_place(piece)])

    def _update(self, bucket: int, gradients: Sequence[Tensor | None]) -> None:
        parts = self._parts(bucket)
        pieces = [
            piece for piece in self._buckets.pieces(bucket) if gradients[piece.span] is not None
        ]
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
        self._publish(bucket, pieces)

    def _stream(self, bucket: int, side: int) -> tuple[list[Tensor], StreamLayout, int]:
        num_bytes = _PARTS * self._buckets.payload_bytes(bucket)
        flat = as_bytes(self._resident.untyped_storage())[:num_bytes]
        layout = StreamLayout.of([num_bytes], self._staging.block_bytes)
        start = side * self.state_bytes
        return [flat], layout, start + bucket * round_up(_PARTS * self._buckets.block_bytes)

    def _read(self, bucket: int, side: int) -> int:
        spans, layout, at = self._stream(bucket, side)
        read_spans(spans, layout, self._file, self._staging, at=at)
        return layout.total_bytes

    def _write(self, bucket: int, side: int) -> int:
        spans, layout, at = self._stream(bucket, side)
        write_spans(spans, layout, self._file, self._staging, at=at)
        return layout.total_bytes

    def save(self, folder: Path, *, rank: int, topology: Mapping[str, int]) -> int:
        """Copy the state to `folder`, where nothing of this rank may be yet; return the bytes.

        `topology` is what must be the same to load it again, such as {"tp": 2, "pp": 4, "dp": 1}.
        """
        copy = DiskFile(_state_path(folder, rank), mode="buffered")
        try:
            copy.preallocate(self.state_bytes)
            self._copy(self._file, copy, source_at=self._side * self.state_bytes)
            copy.finish_writes()
        except DiskOffloadError:
            copy.close()
            raise
        copy.close(keep=True)
        manifest = self._manifest(rank, topology) | {
            "steps": self._steps,
            "started": self._started,
        }
        with _manifest_path(folder, rank).open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return self.state_bytes

    def load(self, folder: Path, *, rank: int, topology: Mapping[str, int]) -> None:
        """Continue from the state in `folder`.

        Raises:
            ResumeError: if it was saved by another topology, for other parameters or with other buckets, or is not whole.
        """
        path = _manifest_path(folder, rank)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            steps, started = list(found.pop("steps")), bool(found.pop("started"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResumeError(
                f"{path}: {error}; expected the optimizer state of rank {rank}. Continue from another checkpoint."
            ) from error
        for key, expected in self._manifest(rank, topology).items():
            if found.get(key) != expected:
                raise ResumeError(
                    f"{path}: {key} was {_short(found.get(key))} when saved, expected {_short(expected)} now. Streamed "
                    "optimizer state continues on the same topology and model and with the same buckets only: restore "
                    "[parallel], [cluster] and offload.optimizer_bucket, or start a new run from the weights."
                )
        copy = DiskFile.of_existing(_state_path(folder, rank))
        try:
            if copy.num_bytes != self.state_bytes:
                raise ResumeError(
                    f"{copy.path}: found {copy.num_bytes} bytes, expected {self.state_bytes}. Continue from another "
                    "checkpoint."
                )
            self._copy(copy, self._file, source_at=0)
            copy.finish_reads()
            self._file.finish_writes()
        finally:
            copy.close(keep=True)
        self._steps, self._started, self._side = steps, started, 0

    def _manifest(self, rank: int, topology: Mapping[str, int]) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "rank": rank,
            "topology": dict(topology),
            "parameters": [
                [name, list(parameter.shape)]
                for name, parameter in zip(self._names, self._parameters, strict=True)
            ],
            "bucket_bytes": self.bucket_bytes,
        }

    def _copy(self, source: DiskFile, target: DiskFile, *, source_at: int) -> None:
        """Copy one state to the start of `target`."""
        layout = StreamLayout.of([self.state_bytes], self._staging.block_bytes)

        def carry(slot: Slot, block: int) -> None:
            memory = slot.memory(layout.payload_bytes(block))
            source.read_block(memory, source_at + block * layout.block_bytes)
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
