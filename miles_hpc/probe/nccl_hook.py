"""Which NCCL a process really uses, told by the library itself; called inside the actors that use NCCL.

Torch maps its own copy by path, so two mapped files are normal: what counts is what the global symbol scope answers, since
that is where torch's calls are bound. Needs neither torch nor a GPU. Knows no run folder.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclProof:
    """What a process was found to use.

    Attributes:
        expected_code: the version code asked for, such as 23007 for 2.30.7.
        found_code: what ncclGetVersion answered through the global symbol scope; None when nothing defines it.
        mapped: NCCL libraries mapped into the process.
    """

    expected_code: int
    found_code: int | None
    mapped: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """The process uses the version asked for."""
        return self.found_code == self.expected_code


def prove_nccl(expected_code: int) -> NcclProof:
    """Return which NCCL the calls of this process reach."""
    return NcclProof(
        expected_code=expected_code,
        found_code=version_code(ctypes.CDLL(None)),
        mapped=mapped_nccl(),
    )


def version_code(library: ctypes.CDLL) -> int | None:
    """Return what `library` says of its version, or None when it has no ncclGetVersion or that fails."""
    try:
        get_version = library.ncclGetVersion
    except AttributeError:
        return None
    code = ctypes.c_int()
    return code.value if get_version(ctypes.byref(code)) == 0 else None


def mapped_nccl() -> tuple[str, ...]:
    """Return the NCCL libraries mapped into this process, sorted."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    names = (line.split(maxsplit=5)[-1] for line in lines if "libnccl" in line)
    return tuple(sorted({name for name in names if Path(name).name.startswith("libnccl.so")}))
