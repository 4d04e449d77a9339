"""What NVIDIA's management library says of the GPUs: `python -m miles_hpc.probe.gpus [LIBRARY]` prints one JSON object.

A child, because a sick driver may keep a caller waiting for good. Judges nothing: `node.checks.gpu` does. A question that
the library or the GPU does not answer gives null. NVML tells no Xid of the past (they stand in the kernel's log); a GPU that
fell off the bus, wants a reset or has bad memory is told by its own error codes and counters.

    {"error": str, "driver": "580.82" or null, "cuda": 13000 or null, "gpus": [{...}, ...]}
"""

import ctypes
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from miles_hpc.run.gpu_state import GpuState

LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_TEXT_BYTES = 96
_UNCORRECTED = 1
_SINCE_BOOT = 0
_SM_CLOCK = 1
_CORE_SENSOR = 0
_MAX_LINKS = 18
_RECOVERY_ACTION = 230


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Fabric(ctypes.Structure):
    """nvmlGpuFabricInfo_t."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


class _Field(ctypes.Structure):
    """nvmlFieldValue_t; the value is a union of eight bytes, of which unsigned int is the first four."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("code", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


@dataclass(slots=True)
class _Nvml:
    """The open library; a question that it cannot answer gives None."""

    library: ctypes.CDLL

    def ask(self, name: str, *arguments: object) -> int | None:
        """Return the code of a call; None when this library has no such function."""
        function: Callable[..., int] | None = getattr(self.library, name, None)
        return None if function is None else int(function(*arguments))

    def number(
        self,
        name: str,
        *arguments: object,
        kind: type[ctypes.c_uint | ctypes.c_ulonglong] = ctypes.c_uint,
    ) -> int | None:
        """Return the number that a call writes behind its last argument."""
        value = kind()
        code = self.ask(name, *arguments, ctypes.byref(value))
        return int(value.value) if code == _SUCCESS else None

    def text(self, name: str, *arguments: object) -> str | None:
        """Return the text that a call writes into a buffer."""
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        code = self.ask(name, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace") if code == _SUCCESS else None

    def counters(self, name: str, device: object, count: int) -> tuple[int | None, ...]:
        """Return `count` numbers that one call writes."""
        values = [ctypes.c_uint() for _ in range(count)]
        code = self.ask(name, device, *(ctypes.byref(value) for value in values))
        return tuple(int(value.value) if code == _SUCCESS else None for value in values)

    def gpu(self, index: int) -> GpuState:
        """Return what the GPU `index` says of itself."""
        device = ctypes.c_void_p()
        code = self.ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        if code != _SUCCESS:
            return GpuState(index=index, code=-1 if code is None else code)
        memory, fabric = _Memory(), _Fabric()
        memory_code = self.ask("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        fabric_code = self.ask("nvmlDeviceGetGpuFabricInfo", device, ctypes.byref(fabric))
        recovery = _Field(field=_RECOVERY_ACTION)
        recovery_code = self.ask("nvmlDeviceGetFieldValues", device, 1, ctypes.byref(recovery))
        ecc, _ = self.counters("nvmlDeviceGetEccMode", device, 2)
        _, remapped, remap_pending, remap_failed = self.counters(
            "nvmlDeviceGetRemappedRows", device, 4
        )
        mig, _ = self.counters("nvmlDeviceGetMigMode", device, 2)
        links = [
            self.number("nvmlDeviceGetNvLinkState", device, link) for link in range(_MAX_LINKS)
        ]
        return GpuState(
            index=index,
            # A GPU that fell off the bus still has a handle; the first question about its state tells.
            code=_SUCCESS if memory_code is None else memory_code,
            name=self.text("nvmlDeviceGetName", device),
            uuid=self.text("nvmlDeviceGetUUID", device),
            memory_bytes=int(memory.total) if memory_code == _SUCCESS else None,
            used_bytes=int(memory.used) if memory_code == _SUCCESS else None,
            ecc_on=None if ecc is None else bool(ecc),
            ecc_uncorrected=self.number(
                "nvmlDeviceGetTotalEccErrors",
                device,
                _UNCORRECTED,
                _SINCE_BOOT,
                kind=ctypes.c_ulonglong,
            ),
            remapped_rows=remapped,
            remap_pending=None if remap_pending is None else bool(remap_pending),
            remap_failed=None if remap_failed is None else bool(remap_failed),
            retired_pending=self.number("nvmlDeviceGetRetiredPagesPendingStatus", device),
            throttle=self.number(
                "nvmlDeviceGetCurrentClocksThrottleReasons", device, kind=ctypes.c_ulonglong
            ),
            clock_mhz=self.number("nvmlDeviceGetClockInfo", device, _SM_CLOCK),
            max_clock_mhz=self.number("nvmlDeviceGetMaxClockInfo", device, _SM_CLOCK),
            celsius=self.number("nvmlDeviceGetTemperature", device, _CORE_SENSOR),
            links_up=sum(1 for link in links if link == 1),
            links_down=sum(1 for link in links if link == 0),
            fabric_state=int(fabric.state) if fabric_code == _SUCCESS else None,
            fabric_status=int(fabric.status) if fabric_code == _SUCCESS else None,
            mig_on=None if mig is None else bool(mig),
            recovery_action=(
                int(recovery.value & 0xFFFFFFFF)
                if recovery_code == _SUCCESS and recovery.code == _SUCCESS
                else None
            ),
        )


def inspect(library: str = LIBRARY) -> dict[str, object]:
    """Return the whole report."""
    nothing: dict[str, object] = {"driver": None, "cuda": None, "gpus": []}
    try:
        nvml = _Nvml(ctypes.CDLL(library))
    except OSError as error:
        return {"error": str(error), **nothing}
    code = nvml.ask("nvmlInit_v2")
    if code != _SUCCESS:
        said = "it has no nvmlInit_v2" if code is None else f"nvmlInit_v2 returned {code}"
        return {"error": f"{library}: {said}", **nothing}
    count = nvml.number("nvmlDeviceGetCount_v2") or 0
    return {
        "error": "",
        "driver": nvml.text("nvmlSystemGetDriverVersion"),
        "cuda": nvml.number("nvmlSystemGetCudaDriverVersion_v2"),
        "gpus": [asdict(nvml.gpu(index)) for index in range(count)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(inspect(*sys.argv[1:2]), indent=1) + "\n")
