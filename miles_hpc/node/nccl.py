"""Whether the NCCL library that the job injects opens on this node and is the one asked for.

ld.so only warns when a preload cannot be opened and the program goes on with another library, so this is settled before
anything starts. Judges what a probe found; opens nothing itself.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import Fault
from miles_hpc.handoff import NcclPin


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclFound:
    """What the probe found: `version_code` is None and `error` says why when the library could not be used."""

    path: Path | None
    version_code: int | None
    error: str


def judge_nccl(pin: NcclPin, found: NcclFound, node: str) -> tuple[Fault, ...]:
    """Return why the library does not satisfy `pin`; nothing means that it does."""
    where = f"{node}: NCCL"
    expected = f"a library that reports {describe_code(pin.version_code)}"
    name = str(found.path or pin.path or "nvidia-nccl-cu13")
    if found.version_code is None:
        fix = "Install nvidia-nccl-cu13 beside the job's Python, or set nccl.path to the library for this machine."
        return (Fault(where=where, found=f"{name}: {found.error}", expected=expected, fix=fix),)
    code = found.version_code
    denied = next((entry for entry in pin.denied if entry.covers(code)), None)
    if denied is not None:
        said = f"{name} reports {describe_code(code)}: {denied.why}"
        return (
            Fault(where=where, found=said, expected=expected, fix="Use another version of NCCL."),
        )
    if found.version_code != pin.version_code:
        said = f"{name} reports {describe_code(found.version_code)}"
        fix = "Install the pinned version, or set nccl.path and nccl.version to what you mean."
        return (Fault(where=where, found=said, expected=expected, fix=fix),)
    return ()


def describe_code(code: int) -> str:
    """Return a version code with the version it means: 23007 is 2.30.7 (NCCL's NCCL_VERSION macro)."""
    if code < 10000:
        return f"{code} ({code // 1000}.{code % 1000 // 100}.{code % 100})"
    return f"{code} ({code // 10000}.{code % 10000 // 100}.{code % 100})"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of the file at `path`; raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
