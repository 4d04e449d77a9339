"""Which NCCL a process really uses, told by the library itself, and the pinned one loaded where the preload was lost.

Torch may map its own copy by path, so two mapped files are normal: what counts is what the global symbol scope answers,
since that is where torch's calls are bound. A library that is loaded into that scope before torch is found there before
torch's own, as a preloaded one is. Run by `python_start.sitecustomize` in every process of the job; needs neither torch nor a
GPU. Judges nothing: what is expected, the node agent knows.
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from miles_hpc.run.events import EventLog, Kind

PYTHON_START = Path(__file__).parent / "python_start"
"""Folder that PYTHONPATH of the job's processes begins with."""


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclProof:
    """What a process was found to use.

    Attributes:
        version_code: what ncclGetVersion answered through the global symbol scope, such as 23007 for 2.30.7; None when nothing
            there defines it.
        library: the file that answered.
        mapped: NCCL libraries mapped into the process.
    """

    version_code: int | None
    library: str | None
    mapped: list[str]


def prove_nccl() -> NcclProof:
    """Return which NCCL the calls of this process reach."""
    scope = ctypes.CDLL(None)
    return NcclProof(
        version_code=version_code(scope),
        library=_library_of(scope),
        mapped=list(mapped_nccl(Path("/proc/self/maps").read_text(errors="replace"))),
    )


def version_code(library: ctypes.CDLL) -> int | None:
    """Return what `library` says of its version, or None when it has no ncclGetVersion or that fails."""
    try:
        get_version = library.ncclGetVersion
    except AttributeError:
        return None
    code = ctypes.c_int()
    return code.value if get_version(ctypes.byref(code)) == 0 else None


def _library_of(library: ctypes.CDLL) -> str | None:
    """Return the file whose ncclGetVersion `library` finds."""
    try:
        address = ctypes.cast(library.ncclGetVersion, ctypes.c_void_p)
    except AttributeError:
        return None
    symbol = _Symbol()
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol)) or not symbol.file_name:
        return None
    return os.fsdecode(symbol.file_name)


def mapped_nccl(maps: str) -> tuple[str, ...]:
    """Return the NCCL libraries that stand in the text of a /proc/PID/maps, sorted."""
    names = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libnccl" in line)
    return tuple(sorted({name for name in names if Path(name).name.startswith("libnccl.so")}))


def load_pinned(torch: ModuleSpec | None) -> None:
    """Load the job's NCCL into the global symbol scope, before a torch that uses NCCL and where nothing else defines it."""
    folders = [] if torch is None else torch.submodule_search_locations or []
    if not any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders):
        return
    if version_code(ctypes.CDLL(None)) is None:
        try:
            ctypes.CDLL(os.environ["MILES_HPC_NCCL"], mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            sys.stderr.write(f"miles-hpc: the job's NCCL cannot be loaded: {error}\n")
    report()


_told: dict[int, tuple[int | None, str | None]] = {}
"""What was written last, by pid: a fork inherits its parent's."""


def report() -> None:
    """Write what this process uses to the node's events, if it is news; a fork of this process does so for itself."""
    proof = prove_nccl()
    found = (proof.version_code, proof.library)
    is_used = proof.version_code is not None or proof.mapped
    if not is_used or _told.get(os.getpid()) == found:
        return
    if not _told:
        os.register_at_fork(after_in_child=report)
    _told[os.getpid()] = found
    role = process_role(sys.orig_argv)
    started = start_ticks(Path("/proc/self/stat").read_bytes())
    try:
        EventLog(
            Path(os.environ["MILES_HPC_EVENTS"]), os.environ.get("MILES_HPC_NODE", "?")
        ).append(Kind.NCCL_PROOF, pid=os.getpid(), start_ticks=started, role=role, **asdict(proof))
    except (KeyError, OSError) as error:
        sys.stderr.write(f"miles-hpc: no proof of NCCL could be written: {error}\n")


def start_ticks(stat: bytes) -> int:
    """Return when a process started, in clock ticks since boot: with the pid it names one process."""
    # The command, in parentheses, may hold blanks and parentheses itself.
    return int(stat.rpartition(b")")[2].split()[19])


def process_role(argv: Sequence[str]) -> str:
    """Return what a process is, without its arguments, which may hold what nobody should read.

    A title that a process has given itself, such as `ray::TrainerHost`, the module or script that Python runs, or the program.
    """
    first = argv[0] if argv else "?"
    title = first.split(maxsplit=1)[0] if first.strip() else "?"
    if "::" in title:
        return title[:60]
    name = title.rpartition("/")[2]
    if not name.startswith("python"):
        return name[:60]
    for index, argument in enumerate(argv[1:], start=1):
        if argument in ("-m", "-c"):
            module = argv[index + 1] if argument == "-m" and index + 1 < len(argv) else argument
            return f"{name} {module}"[:60]
        if not argument.startswith("-"):
            return argument.rpartition("/")[2][:60]
    return name
