"""The locked requirement files agree with pyproject.toml, pin one NCCL, and name no address."""

import hashlib
import platform
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from miles_hpc.spec.job import JobSpec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "env" / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FILES_OF_GROUP = {
    "login": ("login.txt",),
    "cpu": ("login.txt", "cpu.txt", "torch.txt"),
    "test": ("test.txt",),
}
PYTHONS = ("3.11.0", "3.12.0")
MACHINES = ("x86_64", "aarch64")


def read_pins(file: str) -> list[tuple[Requirement, frozenset[str]]]:
    """Return each pinned requirement of a file with its digests."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    pins = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", "\n" + text.split("\n", 1)[1]):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if lines:
            digests = frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", block))
            pins.append((Requirement(lines[0].removesuffix(" \\")), digests))
    return pins


def pins_on(file: str, python: str, machine: str) -> dict[str, Requirement]:
    environment = {
        "python_full_version": python,
        "python_version": python.rsplit(".", 1)[0],
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_python_implementation": "CPython",
    }
    found: dict[str, Requirement] = {}
    for pin, _ in read_pins(file):
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in found, f"{file}: {name} is pinned twice on Python {python}"
            found[name] = pin
    return found


def wanted(group: str) -> list[str]:
    if group == "login":
        return [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]
    return PROJECT["project"]["optional-dependencies"][group]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("group", FILES_OF_GROUP)
def test_every_dependency_of_a_group_is_pinned_within_its_range(group, python, machine):
    pins: dict[str, Requirement] = {}
    for file in FILES_OF_GROUP[group]:
        pins |= pins_on(file, python, machine)
    for entry in wanted(group):
        requirement = Requirement(entry)
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{entry} is in no file of {FILES_OF_GROUP[group]}"
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{entry} against the pin {version}"


@pytest.mark.parametrize("file", sorted(path.name for path in FOLDER.glob("*.txt")))
def test_every_pin_is_exact_and_carries_digests(file):
    pins = read_pins(file)
    assert pins
    for pin, digests in pins:
        assert re.fullmatch(r"==[^*,]+", str(pin.specifier)), f"{file}: {pin}"
        assert digests, f"{file}: {pin} has no --hash"


def test_files_that_are_installed_together_agree():
    seen: dict[tuple[str, str], str] = {}
    for file in ("login.txt", "cpu.txt", "torch.txt", "torch-cuda.txt", "test.txt"):
        for python in PYTHONS:
            for name, pin in pins_on(file, python, "x86_64").items():
                assert seen.setdefault((python, name), str(pin.specifier)) == str(pin.specifier)


NCCL = tomllib.loads((ROOT / "env" / "nccl.toml").read_text(encoding="utf-8"))


def test_exactly_one_nccl_is_pinned_and_it_is_the_one_of_nccl_toml():
    pins = [
        (pin, digests)
        for path in FOLDER.glob("*.txt")
        for pin, digests in read_pins(path.name)
        if "nccl" in pin.name
    ]
    assert [str(pin) for pin, _ in pins] == [f"{NCCL['package']}=={NCCL['version']}"]
    assert pins[0][1] == {f"sha256:{wheel['sha256']}" for wheel in NCCL["wheel"].values()}


def test_the_spec_asks_for_the_pinned_nccl_by_default():
    assert JobSpec.model_fields["nccl"].default.version == NCCL["version"]
    major, minor, patch = map(int, NCCL["version"].split("."))
    assert NCCL["version_code"] == major * 10000 + minor * 100 + patch


def test_the_installed_nccl_is_the_pinned_file():
    library = Path(sysconfig.get_paths()["purelib"]) / NCCL["library"]
    with library.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == NCCL["wheel"][platform.machine()]["library_sha256"]


def test_the_cpu_build_of_torch_is_the_pinned_release():
    ((build, _),), ((release, _),) = read_pins("torch-cpu.txt"), read_pins("torch.txt")
    assert str(build.specifier).split("+")[0] == str(release.specifier)
    assert "+" in str(build.specifier)


def test_the_cuda_runtime_of_torch_stays_out_of_the_cpu_stack():
    names = set(pins_on("cpu.txt", "3.11.0", "x86_64"))
    assert {name for name in names if name.startswith(("nvidia-", "cuda-", "triton"))} == {
        "nvidia-nccl-cu13"
    }
