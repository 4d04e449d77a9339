"""What happens to a trainer rank's memory during rollout, as `offload.train` says: disk, host memory, or nothing.

The disk side is `trainer.disk_offload`; this module chooses, measures the process's memory around each move, and names
the folder. Knows no model: it is given the tensors.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from miles_hpc.spec.job import OffloadTable
from miles_hpc.trainer.disk_offload import DiskOffload, ResizedStorages, as_bytes, distinct_storages
from miles_hpc.trainer.rank_dir import rank_dir_from_environ


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One offload or onload.

    Attributes:
        bytes: moved; 0 when there was nothing to do.
        rss_before / rss_after: resident memory of this process, in bytes.
        path: the file; "" when no file is involved.
    """

    bytes: int
    seconds: float
    rss_before: int
    rss_after: int
    path: str


class Shelf(Protocol):
    """Where the tensors of a sleeping trainer lie; repeated calls of one kind do nothing."""

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Move `tensors` out and free their memory; on an error they are as they were."""

    def onload(self) -> Move:
        """Bring back what is out."""

    def close(self) -> None:
        """Give up the place itself; what is out is lost."""


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _measured(move: Callable[[], int], path: str) -> Move:
    started, before = time.monotonic(), resident_bytes()
    count = move()
    seconds = time.monotonic() - started
    return Move(
        bytes=count, seconds=seconds, rss_before=before, rss_after=resident_bytes(), path=path
    )


class DiskShelf:
    """One file of this rank below the job's scratch folder on this node."""

    def __init__(
        self, table: OffloadTable, device: torch.device, rank: int, environ: Mapping[str, str]
    ) -> None:
        self._folder = rank_dir_from_environ(environ, rank, allow_memory=table.allow_memory_scratch)
        self._disk = DiskOffload(
            self._folder.path / "trainer.bin", device=device, chunk_bytes=table.chunk
        )

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Write `tensors` to the file, then free their memory."""

        def move() -> int:
            return 0 if self._disk.is_out else self._disk.offload(tensors).num_bytes

        return _measured(move, str(self._disk.path))

    def onload(self) -> Move:
        """Read everything back."""

        def move() -> int:
            return self._disk.onload().num_bytes if self._disk.is_out else 0

        return _measured(move, str(self._disk.path))

    def close(self) -> None:
        """Remove the file and its folder."""
        self._disk.close()
        self._folder.close()


class HostShelf:
    """Pinned host memory for CUDA tensors, kept between moves: allocating it takes longer than the copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, ResizedStorages()
        self._out: tuple[torch.UntypedStorage, ...] = ()
        self._copies: list[Tensor] = []

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Copy the storages of `tensors` to the host, then free them on the GPU."""

        def move() -> int:
            if self._out:
                return 0
            storages = distinct_storages(tensors, self._device)
            sizes = [storage.size() for storage in storages]
            if [copy.numel() for copy in self._copies] != sizes:
                self._copies = [
                    torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes
                ]
            for storage, copy in zip(storages, self._copies, strict=True):
                copy.copy_(as_bytes(storage))
            self._memory.release(storages)
            self._out = storages
            return sum(sizes)

        return _measured(move, "")

    def onload(self) -> Move:
        """Copy everything back."""

        def move() -> int:
            storages, self._out = self._out, ()
            sizes = [copy.numel() for copy in self._copies]
            if not storages:
                return 0
            self._memory.restore(storages, sizes)
            for storage, copy in zip(storages, self._copies, strict=True):
                as_bytes(storage).copy_(copy)
            return sum(sizes)

        return _measured(move, "")

    def close(self) -> None:
        """Free the host copies."""
        self._copies = []


class NoShelf:
    """The tensors stay where they are."""

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Do nothing."""
        return _measured(lambda: 0, "")

    def onload(self) -> Move:
        """Do nothing."""
        return _measured(lambda: 0, "")

    def close(self) -> None:
        """Do nothing."""


def make_shelf(
    table: OffloadTable, device: torch.device, rank: int, environ: Mapping[str, str]
) -> Shelf:
    """Return the shelf that `offload.train` names; "host" moves nothing when the trainer is on the CPU already.

    Raises:
        DiskOffloadError: if the rank's folder cannot be made or is not on a local disk.
    """
    if table.train == "disk":
        return DiskShelf(table, device, rank, environ)
    if table.train == "host" and device.type == "cuda":
        return HostShelf(device)
    return NoShelf()
