"""What the job's interpreter holds: `python -m miles_hpc.probe.interpreter [NCCL_PATH | --no-nccl]` prints one JSON object.

A child, because a broken library would take the agent down with it. It finds Ray without importing it: that would cost
every start the time of a second import, and `ray start` says the rest.

    {"python": "3.11.7", "ray": "2.60.0" or null, "ray_client": bool,
     "torch": "2.13.0+cu130" or null, "cuda": {"torch": "13.0", "nvidia-nccl-cu13": "13"} as far as it is known,
     "nccl_path": str or null, "nccl_code": int or null, "nccl_error": str}
"""

import ctypes
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
from pathlib import Path

from miles_hpc.probe.nccl_hook import version_code


def find_packaged_nccl() -> Path | None:
    """Return libnccl.so.2 of the nvidia-nccl-cu13 package of this interpreter, or None when it is not installed."""
    try:
        files = importlib.metadata.files("nvidia-nccl-cu13") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "libnccl.so.2"), None)


def open_nccl(path: Path | None) -> dict[str, object]:
    """Return path, version code and error of the library at `path`, None meaning the packaged one."""
    chosen = find_packaged_nccl() if path is None else path
    if chosen is None:
        error = f"the package nvidia-nccl-cu13 is not installed in {sys.prefix}"
        return {"nccl_path": None, "nccl_code": None, "nccl_error": error}
    code, error = None, ""
    try:
        code = version_code(ctypes.CDLL(str(chosen)))
    except OSError as problem:
        error = str(problem)
    else:
        error = "" if code is not None else "it has no working ncclGetVersion"
    return {"nccl_path": str(chosen), "nccl_code": code, "nccl_error": error}


def find_torch() -> tuple[str | None, str | None]:
    """Return torch's version and the CUDA it was built for, from its files: importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None, None
    try:
        text = (Path(found.origin).parent / "version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "unknown", None
    version = re.search(r"^__version__\s*=\s*'([^']+)'", text, re.M)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*'([^']+)'", text, re.M)
    return "unknown" if version is None else version[1], None if cuda is None else cuda[1]


def inspect(argument: str | None) -> dict[str, object]:
    """Return the whole report; `argument` is the NCCL path, "--no-nccl" or None for the packaged library."""
    found_ray = importlib.util.find_spec("ray") is not None
    try:
        ray_version = importlib.metadata.version("ray") if found_ray else None
    except importlib.metadata.PackageNotFoundError:
        ray_version = "unknown" if found_ray else None
    nccl: dict[str, object] = {"nccl_path": None, "nccl_code": None, "nccl_error": ""}
    if argument != "--no-nccl":
        nccl = open_nccl(None if argument is None else Path(argument))
    torch_version, torch_cuda = find_torch()
    cuda = {} if torch_cuda is None else {"torch": torch_cuda}
    if argument is None and nccl["nccl_path"] is not None:
        cuda["nvidia-nccl-cu13"] = "13"
    return {
        "torch": torch_version,
        "cuda": cuda,
        "python": platform.python_version(),
        "ray": ray_version,
        "ray_client": importlib.util.find_spec("grpc") is not None,
        **nccl,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(inspect(sys.argv[1] if len(sys.argv) > 1 else None)) + "\n")
