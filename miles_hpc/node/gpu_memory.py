"""GPU memory by process, from NVIDIA's management library through ctypes.

A node without the library, or a library that fails, gives no figures and no error: sampling never ends a job. Knows
nothing of host memory.
"""

import contextlib
import ctypes
from collections.abc import Collection
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_MOST_PROCESSES = 256
_NOT_AVAILABLE = 2**64 - 1


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t as nvmlDeviceGetComputeRunningProcesses_v3 fills it."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU.

    Attributes:
        job_bytes: what the job holds: its processes' sum, or all that is used where NVML does not tell the processes apart.
        processes: (pid, bytes) of the job's own processes.
    """

    index: int
    job_bytes: int
    processes: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class GpuReader:
    """An open management library and the GPUs it shows."""

    library: ctypes.CDLL
    devices: tuple[ctypes.c_void_p, ...]

    def read(self, own: Collection[int]) -> tuple[GpuUse, ...]:
        """Return the use of each GPU; `own` are the pids of the job.

        In a pid namespace of its own NVML names pids that are not ours; then all that is used on the GPU counts as the job's.
        """
        return tuple(self._read_one(index, own) for index in range(len(self.devices)))

    def _read_one(self, index: int, own: Collection[int]) -> GpuUse:
        device = self.devices[index]
        memory = _Memory()
        used = 0
        if self.library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == _SUCCESS:
            used = int(memory.used)
        count = ctypes.c_uint(_MOST_PROCESSES)
        found = (_Process * _MOST_PROCESSES)()
        code = self.library.nvmlDeviceGetComputeRunningProcesses_v3(
            device, ctypes.byref(count), found
        )
        if code != _SUCCESS:
            return GpuUse(index=index, job_bytes=used, processes=())
        listed = [(int(entry.pid), int(entry.used)) for entry in found[: count.value]]
        mine = tuple((pid, size) for pid, size in listed if pid in own and size != _NOT_AVAILABLE)
        foreign = any(pid not in own for pid, _ in listed)
        hidden = used if not mine and (foreign or not listed) else 0
        return GpuUse(
            index=index, job_bytes=sum(size for _, size in mine) or hidden, processes=mine
        )


def open_gpus(library: str = LIBRARY) -> GpuReader | None:
    """Open the management library and its GPUs; None where there is none."""
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() != _SUCCESS:
            return None
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
            return None
        devices = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == _SUCCESS:
                devices.append(device)
        return GpuReader(library=nvml, devices=tuple(devices))
    return None
