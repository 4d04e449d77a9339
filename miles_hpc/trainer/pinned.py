"""Host memory of an exact size, page-aligned, pinned for a GPU when one is at the other end, and given back on demand.

torch's own pinned allocator rounds sizes up to powers of two and never gives memory back to the system; a 50 GiB copy of a
rank would take 64 and keep them. Knows nothing of tensors' meaning or files.
"""

import contextlib
import mmap
from pathlib import Path
from typing import Any

import torch

from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.units import format_bytes


class PinnedMemory:
    """`num_bytes` of memory, all of it resident from the start.

    Args:
        device: a CUDA device makes the memory pinned.
        purpose: what it is for, in an error message.

    Raises:
        DiskOffloadError: if that much is not available on this node or in this cgroup.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, purpose: str) -> None:
        self.num_bytes = num_bytes
        self._pinned = False
        available = available_bytes()
        if num_bytes > available:
            raise DiskOffloadError(
                f"{purpose}: found {format_bytes(available)} of host memory available, expected "
                f"{format_bytes(num_bytes)} ({num_bytes} bytes). Ask for more memory per node, lower offload.chunk, or "
                'offload to disk (offload.train = "disk").'
            )
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise DiskOffloadError(
                f"{purpose}: {format_bytes(num_bytes)} of host memory: {error}; expected that much to be free. Ask "
                "for more memory per node."
            ) from error
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        # Touched here, by all of torch's threads: a registration faults pages in one by one.
        self._tensor: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8).fill_(0)
        if device.type == "cuda":
            check_cuda(cudart().cudaHostRegister(self._tensor.data_ptr(), num_bytes, 0))
            self._pinned = True

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a flat uint8 tensor; only while open."""
        assert self._tensor is not None, "closed"
        return self._tensor

    def view(self, start: int, num_bytes: int) -> memoryview:
        """Return the raw memory of a part."""
        return memoryview(self._map)[start : start + num_bytes]

    def close(self) -> None:
        """Give the memory back; a second call does nothing. Tensors made from `tensor` must be gone by then."""
        if self._tensor is None:
            return
        if self._pinned:
            check_cuda(cudart().cudaHostUnregister(self._tensor.data_ptr()))
        self._tensor = None
        with contextlib.suppress(BufferError):  # something still looks at it: freed with that
            self._map.close()


def available_bytes() -> int:
    """Return the host memory that this process may still take: the machine's, or less if its cgroup allows less.

    Page cache that the kernel would give up counts as available in both.
    """
    words = dict(
        line.split(":", 1)
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    machine = int(words["MemAvailable"].split()[0]) * 1024
    return min(
        [machine, *(room for room in map(_room_of_cgroup, _own_cgroups()) if room is not None)]
    )


def _own_cgroups() -> list[tuple[Path, str, str, str]]:
    """Return (folder, limit file, usage file, key of reclaimable cache) for each memory cgroup above this process."""
    found = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root /= "memory"
        elif not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        found += [(at, *names) for at in (folder, *folder.parents) if at.is_relative_to(root)]
    return found


def _room_of_cgroup(group: tuple[Path, str, str, str]) -> int | None:
    folder, limit_name, usage_name, cache_key = group
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / usage_name).read_text()) - int(stat.get(cache_key, 0))
    except (OSError, ValueError):
        return None
    return max(int(limit) - used, 0)


def cudart() -> Any:  # noqa: ANN401 - the binding has no types
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def check_cuda(result: object) -> None:
    """Raise if a call of the CUDA runtime failed."""
    torch.cuda.check_error(int(result))  # type: ignore[call-overload]
