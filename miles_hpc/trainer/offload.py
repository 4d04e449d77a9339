"""What happens to a trainer rank's memory during rollout, as `offload.train` says: disk, host memory, or nothing.

The disk side is `trainer.disk_offload`, the host side `trainer.host_arena`; this module chooses, measures the process's
memory around each move, and names the folder. Knows no model: it is given the tensors.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from miles_hpc import filesystem
from miles_hpc.spec.job import OffloadTable
from miles_hpc.trainer.disk_offload import DiskOffload, Moved
from miles_hpc.trainer.host_arena import HostArena
from miles_hpc.trainer.rank_dir import rank_dir_from_environ


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One offload or onload.

    Attributes:
        bytes: moved; 0 when there was nothing to do.
        rss_before / rss_after: resident memory of this process, in bytes.
        path: the file; "" when no file is involved.
        direct: the file was written or read by direct I/O.
        cached: bytes of the file left in the page cache.
    """

    bytes: int
    seconds: float
    rss_before: int
    rss_after: int
    path: str = ""
    direct: bool = False
    cached: int = 0


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


def _measured(move: Callable[[], Moved | None]) -> Move:
    """Run `move` between two looks at this process's memory; None stands for nothing to do."""
    started, before = time.monotonic(), resident_bytes()
    moved = move()
    return Move(
        bytes=0 if moved is None else moved.num_bytes,
        seconds=time.monotonic() - started,
        rss_before=before,
        rss_after=resident_bytes(),
        direct=moved is not None and bool(moved.direct),
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
        return self._with_file(
            _measured(lambda: None if self._disk.is_out else self._disk.offload(tensors))
        )

    def onload(self) -> Move:
        """Read everything back."""
        return self._with_file(
            _measured(lambda: self._disk.onload() if self._disk.is_out else None)
        )

    def _with_file(self, move: Move) -> Move:
        path = self._disk.path
        return replace(move, path=str(path), cached=filesystem.resident_bytes(path))

    def close(self) -> None:
        """Remove the file and its folder."""
        self._disk.close()
        self._folder.close()


class HostShelf:
    """One arena of pinned host memory, kept between moves."""

    def __init__(self, device: torch.device) -> None:
        self._arena = HostArena(device=device)

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Copy `tensors` to the arena, then free them on the GPU."""
        return _measured(lambda: None if self._arena.is_out else self._arena.offload(tensors))

    def onload(self) -> Move:
        """Copy everything back."""
        return _measured(lambda: self._arena.onload() if self._arena.is_out else None)

    def close(self) -> None:
        """Give the arena back."""
        self._arena.close()


class NoShelf:
    """The tensors stay where they are."""

    def offload(self, tensors: Sequence[Tensor]) -> Move:
        """Do nothing."""
        return _measured(lambda: None)

    def onload(self) -> Move:
        """Do nothing."""
        return _measured(lambda: None)

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
