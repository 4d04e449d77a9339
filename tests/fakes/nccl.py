"""Compiled stand-ins of NCCL and of a torch that is built for CUDA: enough to see whose ncclGetVersion a call reaches.

The real CUDA build of torch is not installed for tests. It finds its NCCL by the RPATH of libtorch_cuda.so or, as some
releases do at import, by path; both ways are built here.
"""

import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest

NAME = "libnccl.so.2"
_NCCL = r"int ncclGetVersion(int *version) { *version = CODE; return 0; }"
_TORCH_CUDA = r"""
int ncclGetVersion(int *version);
int used_nccl(void) { int code = 0; ncclGetVersion(&code); return code; }
"""
_TORCH = """
import ctypes, pathlib
lib = pathlib.Path(__file__).parent / "lib"
BY_PATH
_cuda = ctypes.CDLL(str(lib / "libtorch_cuda.so"), mode=ctypes.RTLD_GLOBAL)
used_nccl = _cuda.used_nccl
"""
By = Literal["rpath", "runpath", "path, global", "path, local"]


def make_nccl(folder: Path, code: int) -> Path:
    """Return a library in `folder` whose ncclGetVersion answers `code`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    _compile(_NCCL, path, f"-DCODE={code}", f"-Wl,-soname,{NAME}")
    return path


def make_torch(folder: Path, nccl: Path, by: By = "rpath") -> Path:
    """Return a folder for PYTHONPATH whose torch links to `nccl` and tells by `used_nccl()` whose version it reaches."""
    lib = folder / "torch" / "lib"
    lib.mkdir(parents=True)
    tags = "--enable-new-dtags" if by == "runpath" else "--disable-new-dtags"
    _compile(
        _TORCH_CUDA,
        lib / "libtorch_cuda.so",
        str(nccl),
        f"-Wl,{tags},-rpath,{nccl.parent}",
    )
    mode = {"path, global": "RTLD_GLOBAL", "path, local": "RTLD_LOCAL"}.get(by)
    first = "" if mode is None else f"ctypes.CDLL({str(nccl)!r}, mode=ctypes.{mode})"
    (folder / "torch" / "__init__.py").write_text(_TORCH.replace("BY_PATH", first))
    return folder


def _compile(source: str, path: Path, *options: str) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine; install gcc")
    argv = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *options]
    subprocess.run(argv, input=source, text=True, check=True, timeout=60)
