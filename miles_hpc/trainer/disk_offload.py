"""Move a set of tensors out of memory to one file of this rank, and back, bit for bit.

The unit is a storage, moved whole: views, strides, gaps and shared parameters stay what they were, whatever the dtype.
Memory is freed only once every byte is on the disk, and a failure leaves the tensors as they were. Knows neither models
nor optimizers; which folder is whose is `rank_dir`'s business.
"""

import ctypes
import mmap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from miles_hpc.trainer.disk_file import DiskFile, DiskOffloadError, IoMode
from miles_hpc.trainer.disk_layout import StreamLayout, round_up
from miles_hpc.trainer.disk_staging import REQUESTS_IN_FLIGHT, Staging, read_spans, write_spans

_libc = ctypes.CDLL(None)
_HUGE_PAGE_BYTES = 2**21


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one offload or onload did.

    Attributes:
        num_bytes: bytes of the storages moved.
        seconds: wall clock, flush to the device included.
        direct: direct I/O was used; None when no disk was involved.
    """

    num_bytes: int
    seconds: float
    direct: bool | None


class Memory(Protocol):
    """How the memory of storages is given back and taken again; their bytes need not survive in between."""

    def release(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Give the memory of all `storages` back."""

    def restore(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        """Make all `storages` usable again with their `sizes` in bytes; called again after a failure."""


class ResizedStorages:
    """Frees storages by resizing them to nothing; tensors keep working, but their addresses change."""

    def release(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Resize to nothing, and hand what the allocators keep back to the device and the system."""
        kinds = {storage.device.type for storage in storages}
        for storage in storages:
            storage.resize_(0)
        if "cuda" in kinds:
            torch.cuda.empty_cache()
        if "cpu" in kinds and hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    def restore(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        """Resize to the former sizes."""
        for storage, size in zip(storages, sizes, strict=True):
            if storage.size() != size:
                storage.resize_(size)
                if storage.device.type == "cpu":
                    _prefer_huge_pages(storage.data_ptr(), size)


def _prefer_huge_pages(address: int, size: int) -> None:
    """Let the first touch of fresh memory fault in 2 MiB at a time: 4 KiB faults cost more than the disk does."""
    first = round_up(address, _HUGE_PAGE_BYTES)
    length = (address + size - first) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if length > 0:  # advice: a kernel that cannot follow it says so and nothing is lost
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


class SaverRegion:
    """Frees a torch_memory_saver region that keeps no backup of its own; addresses stay, so captured graphs do too.

    Args:
        saver: `torch_memory_saver.torch_memory_saver`, or anything with its `pause` and `resume`.
        tag: the region's tag; every storage given must lie in it.
    """

    def __init__(self, saver: "_Saver", tag: str) -> None:
        self._saver = saver
        self._tag = tag
        self._paused = False

    def release(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Pause the region; checks that memory of the GPU really fell, which the saver itself does not."""
        wanted = sum(storage.size() for storage in storages)
        device = next((storage.device for storage in storages if storage.size()), None)
        if device is None:
            return
        before = torch.cuda.mem_get_info(device)[0]
        self._saver.pause(self._tag)
        self._paused = True
        freed = torch.cuda.mem_get_info(device)[0] - before
        if freed < wanted // 2:
            self._saver.resume(self._tag)
            self._paused = False
            raise DiskOffloadError(
                f"memory saver region {self._tag!r}: pausing freed {freed} bytes, expected about {wanted}. Load "
                "torch_memory_saver by LD_PRELOAD, unset expandable_segments, and allocate the tensors in that region."
            )

    def restore(self, storages: Sequence[torch.UntypedStorage], sizes: Sequence[int]) -> None:
        """Resume the region; the storages were never resized."""
        if self._paused:
            self._saver.resume(self._tag)
            self._paused = False


class _Saver(Protocol):
    def pause(self, tag: str) -> None: ...

    def resume(self, tag: str) -> None: ...


class DiskOffload:
    """The offloaded half of one rank: a file, staging memory, and which storages are out.

    Args:
        path: the rank's file, made here and removed by `close`.
        device: where the tensors live.
        chunk_bytes: host memory held is at most two chunks.
        mode, checksums: as in `DiskFile`.
        memory: how memory is given back; resizing by default.
        requests_in_flight: disk requests at a time.
    """

    def __init__(  # noqa: PLR0913 - one object with independent settings, all keyword-only
        self,
        path: Path,
        *,
        device: torch.device,
        chunk_bytes: int,
        mode: IoMode = "auto",
        checksums: bool = False,
        memory: Memory | None = None,
        requests_in_flight: int = REQUESTS_IN_FLIGHT,
    ) -> None:
        self._memory: Memory = ResizedStorages() if memory is None else memory
        self._staging = Staging(chunk_bytes, device, slots=requests_in_flight)
        try:
            self._file = DiskFile(path, mode=mode, checksums=checksums)
        except DiskOffloadError:
            self._staging.close()
            raise
        self._out: tuple[tuple[torch.UntypedStorage, ...], StreamLayout] | None = None

    @property
    def path(self) -> Path:
        """The rank's file."""
        return self._file.path

    @property
    def is_out(self) -> bool:
        """The tensors are on the disk and their memory is free."""
        return self._out is not None

    @property
    def staging_bytes(self) -> int:
        """Host memory held for as long as this object is open."""
        return self._staging.num_bytes

    def offload(self, tensors: Iterable[torch.Tensor]) -> Moved:
        """Write the storages of `tensors` to the file, then free their memory.

        The tensors must not be used until `onload`; those that share a storage go together.

        Raises:
            DiskOffloadError: with nothing freed and nothing changed.
        """
        if self._out is not None:
            raise DiskOffloadError(
                f"{self.path}: already holds {self._out[1].total_bytes} bytes that are out; expected none. "
                "Onload before the next offload."
            )
        started = time.perf_counter()
        storages = distinct_storages(tensors, self._staging.device)
        layout = StreamLayout.of(
            [storage.size() for storage in storages], self._staging.block_bytes
        )
        self._file.preallocate(layout.file_bytes)
        spans = [as_bytes(storage) for storage in storages]
        write_spans(spans, layout, self._file, self._staging)
        self._file.finish_writes()
        self._file.check_present()  # bytes in a file that has lost its name are as good as gone
        self._memory.release(storages)
        self._out = (storages, layout)
        return Moved(
            num_bytes=layout.total_bytes,
            seconds=time.perf_counter() - started,
            direct=self._file.direct,
        )

    def onload(self) -> Moved:
        """Take the memory again and read every byte back.

        Raises:
            DiskOffloadError: the bytes are still in the file as far as it can be read; onload may be called again.
        """
        if self._out is None:
            raise DiskOffloadError(
                f"{self.path}: nothing is out; expected an offload before onload."
            )
        started = time.perf_counter()
        storages, layout = self._out
        self._file.check_present()
        self._memory.restore(storages, layout.span_bytes)
        spans = [as_bytes(storage) for storage in storages]
        read_spans(spans, layout, self._file, self._staging)
        self._file.finish_reads()
        self._out = None
        return Moved(
            num_bytes=layout.total_bytes,
            seconds=time.perf_counter() - started,
            direct=self._file.direct,
        )

    def close(self) -> None:
        """Remove the file and give the staging memory back; bytes that are out are lost."""
        self._file.close()
        self._staging.close()


def distinct_storages(
    tensors: Iterable[torch.Tensor], device: torch.device
) -> tuple[torch.UntypedStorage, ...]:
    """Return the storages behind `tensors`, each once, in order of first appearance.

    Raises:
        DiskOffloadError: if a tensor lives elsewhere than on `device`, has no storage, or its storage is not torch's own.
    """
    found: dict[int, torch.UntypedStorage] = {}
    home = torch.empty(0, device=device).device  # "cuda" becomes the current "cuda:N"
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device != home:
            raise DiskOffloadError(
                f"offload: found a {tensor.layout} tensor of shape {tuple(tensor.shape)} on {tensor.device}; expected "
                f"strided tensors on {device}. Offload it where it lives, or leave it out."
            )
        storage = tensor.untyped_storage()
        if not storage.resizable():
            raise DiskOffloadError(
                f"offload: the memory of a tensor of shape {tuple(tensor.shape)} belongs to another owner (NumPy, a "
                "file mapping or another process); expected memory that torch can free. Clone the tensor first."
            )
        found.setdefault(storage._cdata, storage)
    return tuple(found.values())


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a flat uint8 tensor over all of `storage`; writing to it bumps no version counter of its tensors."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.size(),), (1,))
