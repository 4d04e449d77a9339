"""What one GPU says of itself, as the probe writes it and the checks read it. Knows no library and no limit."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One GPU by NVML; None means that the library or the GPU does not tell.

    Attributes:
        code: NVML's answer to the first question about it; 0 is success.
        ecc_uncorrected: uncorrected memory errors since the driver was loaded.
        remapped_rows: rows of memory replaced because of uncorrected errors.
        remap_pending: a replacement waits for a reset of the GPU.
        remap_failed: no spare row was left.
        retired_pending: the same as `remap_pending` on GPUs before Ampere.
        throttle: bits of nvmlClocksEventReason.
        links_up / links_down: NVLinks that are active and that are not; both 0 without NVLink.
        fabric_state: of NVSwitch: 0 not supported, 1 not started, 2 in progress, 3 completed.
        fabric_status: NVML code of the registration, once it is completed.
        recovery_action: what the driver asks for: 0 nothing, 1 GPU reset, 2 node reboot, 3 and 4 drain.
    """

    index: int
    code: int = 0
    name: str | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    ecc_on: bool | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retired_pending: int | None = None
    throttle: int | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    celsius: int | None = None
    links_up: int = 0
    links_down: int = 0
    fabric_state: int | None = None
    fabric_status: int | None = None
    mig_on: bool | None = None
    recovery_action: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """All GPUs of a node and their driver.

    Attributes:
        error: why there is no answer; empty when there is one.
        cuda: newest CUDA that the driver runs, as CUDA counts (13020 is 13.2).
    """

    error: str
    driver: str | None = None
    cuda: int | None = None
    gpus: tuple[GpuState, ...] = ()


def gpu_report_from(raw: Mapping[str, object]) -> GpuReport:
    """Return the report in the probe's JSON object; raises TypeError for one of another version."""
    driver, cuda, gpus = raw.get("driver"), raw.get("cuda"), raw.get("gpus")
    return GpuReport(
        error=str(raw.get("error", "")),
        driver=None if driver is None else str(driver),
        cuda=cuda if isinstance(cuda, int) else None,
        gpus=tuple(GpuState(**entry) for entry in gpus) if isinstance(gpus, list) else (),
    )
