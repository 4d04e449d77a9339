"""The NCCL that a job's nodes are told to demand: the spec's version, and the versions that env/nccl.toml denies.

Opens no library: whether the one on a node satisfies the pin is judged there.
"""

import tomllib
from collections.abc import Sequence

from miles_hpc.errors import Fault, PlanError
from miles_hpc.handoff import DeniedNccl, NcclPin
from miles_hpc.paths import packaged
from miles_hpc.spec.job import JobSpec


def make_nccl_pin(spec: JobSpec) -> NcclPin | None:
    """Return the pin of a job; None when it preloads no NCCL.

    Raises:
        PlanError: if the spec asks for a denied version.
    """
    if not spec.nccl.preload:
        return None
    denied = read_denied()
    code = version_code(spec.nccl.version)
    refuse_denied(spec.nccl.version, denied)
    path = None if spec.nccl.path is None else str(spec.nccl.path)
    return NcclPin(
        path=path,
        version_code=code,
        preload=True,
        on_mismatch=spec.nccl.on_mismatch,
        denied=denied,
    )


def read_denied() -> tuple[DeniedNccl, ...]:
    """Return the deny-list of env/nccl.toml."""
    text = (packaged("env") / "nccl.toml").read_text(encoding="utf-8")
    return tuple(
        DeniedNccl(
            first_code=version_code(entry["first"]),
            last_code=version_code(entry["last"]),
            why=entry["why"],
        )
        for entry in tomllib.loads(text)["denied"]
    )


def refuse_denied(version: str, denied: Sequence[DeniedNccl]) -> None:
    """Raise PlanError if `version` is on the deny-list."""
    for entry in denied:
        if entry.covers(version_code(version)):
            fault = Fault(
                where="nccl.version",
                found=f"{version}: {entry.why}",
                expected="a version that env/nccl.toml does not deny",
                fix="Remove the key to get the pinned version, or set another one.",
            )
            raise PlanError(str(fault))


def version_code(version: str) -> int:
    """Return what ncclGetVersion reports for "2.30.7" (NCCL_VERSION of nccl.h, from 2.9 on)."""
    major, minor, patch = (int(part) for part in version.split("."))
    return major * 10000 + minor * 100 + patch
