"""The flake, its lock and the stub nixpkgs: every file parses, every output evaluates, and what is built is what was pinned."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.nix.conftest import ROOT

pytestmark = pytest.mark.timeout(900)
FILES = [
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("env/nix/*.nix")),
    "flake.nix",
]
PIN = tomllib.loads((ROOT / "env" / "nccl.toml").read_text(encoding="utf-8"))
SYSTEMS = {"x86_64-linux", "aarch64-linux"}


@pytest.mark.parametrize("file", FILES)
def test_every_file_parses(nix, file):
    done = nix.run("nix-instantiate", "--parse", file)
    assert done.returncode == 0, done.stderr


def test_lock_and_flake_agree(nix, checkout):
    done = nix.run("nix", "flake", "metadata", "--no-update-lock-file", "--json", ".", cwd=checkout)
    assert done.returncode == 0, done.stderr
    locked = json.loads(done.stdout)["locks"]["nodes"]["nixpkgs"]["locked"]
    assert re.fullmatch(r"[0-9a-f]{40}", locked["rev"])
    assert locked["narHash"].startswith("sha256-")


def test_a_lock_that_does_not_belong_to_the_flake_is_noticed(nix, checkout, tmp_path):
    other = tmp_path / "checkout"
    shutil.copytree(checkout, other)
    flake = other / "flake.nix"
    flake.write_text(flake.read_text(encoding="utf-8").replace("nixos-26.05", "nixos-25.11"))
    done = nix.run("nix", "flake", "metadata", "--no-update-lock-file", ".", cwd=other)
    assert done.returncode != 0
    assert "nixos-25.11" in done.stderr


def test_every_output_evaluates_on_both_machines(nix, checkout):
    done = nix.flake("flake check --no-build --all-systems", ".", flake=checkout)
    assert done.returncode == 0, done.stderr
    shown = nix.flake("flake show --json --all-systems", ".", flake=checkout)
    outputs = json.loads(shown.stdout)
    assert set(outputs["packages"]) == SYSTEMS
    for system in SYSTEMS:
        assert set(outputs["packages"][system]) == {
            "default", "environment", "image", "launcher", "miles-hpc", "nccl",
        }  # fmt: skip
        assert set(outputs["apps"][system]) == {"default", "demo", "miles-hpc"}
        assert set(outputs["devShells"][system]) == {"cpu", "default", "gpu", "login"}
        assert set(outputs["checks"][system]) == {"lint", "miles-hpc", "pin", "types", "unit"}


def test_the_overlay_adds_the_packages_to_a_package_set(nix, checkout):
    expression = (
        f'let flake = builtins.getFlake "path:{checkout}"; '
        f'pkgs = (import {nix.stub}/default.nix {{ system = "x86_64-linux"; }}); '
        "in builtins.attrNames (flake.overlays.default pkgs pkgs)"
    )
    done = nix.run("nix", "eval", "--impure", "--json", "--expr", expression)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["miles-hpc", "miles-hpc-launcher", "miles-hpc-nccl"]


@pytest.mark.parametrize("check", ["lint", "types", "unit", "miles-hpc", "pin"])
def test_every_check_passes(seeded, checkout, check):
    done = seeded.flake("build --no-link -L", f".#checks.x86_64-linux.{check}", flake=checkout)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_check_fails_on_code_that_ruff_refuses(seeded, checkout, tmp_path):
    other = tmp_path / "checkout"
    shutil.copytree(checkout, other)
    broken = other / "miles_hpc" / "units.py"
    broken.write_text(broken.read_text(encoding="utf-8") + "import os\n", encoding="utf-8")
    done = seeded.flake("build --no-link -L", ".#checks.x86_64-linux.lint", flake=other)
    assert done.returncode != 0
    assert "F401" in done.stderr


def test_the_command_runs_without_a_shell(nix, checkout):
    done = nix.flake("run", ".#miles-hpc", "--", "check", "jobs/demo_tiny.toml", flake=checkout)
    assert done.returncode == 0, done.stderr


def test_the_demo_says_where_it_must_be_started(nix, checkout, tmp_path):
    done = nix.flake("run", f"path:{checkout}#demo", flake=tmp_path)
    assert done.returncode == 1
    assert "expected a checkout of miles-hpc" in done.stderr


def test_nccl_is_the_pinned_file_byte_for_byte(seeded, checkout):
    library = seeded.build("nccl", checkout) / "lib" / "libnccl.so.2"
    digest = seeded.run("nix", "hash", "file", "--base16", "--type", "sha256", str(library)).stdout
    assert digest.strip() == PIN["wheel"]["x86_64"]["library_sha256"]
    closure = seeded.run("nix-store", "--query", "--references", str(library.parents[1])).stdout
    assert closure == ""


def test_nothing_is_built_from_a_wheel_that_is_not_there(nix, checkout, tmp_path):
    """Proves that the wheel of the other tests is the one that the flake asks for."""
    other = tmp_path / "checkout"
    shutil.copytree(checkout, other)
    tamper(other, "sha256", PIN["wheel"]["x86_64"]["sha256"])
    done = nix.flake("build --no-link -L", ".#nccl", flake=other)
    assert done.returncode != 0
    assert "the stub fetches nothing" in done.stderr


def test_a_pin_with_another_library_digest_fails(seeded, checkout, tmp_path):
    other = tmp_path / "checkout"
    shutil.copytree(checkout, other)
    tamper(other, "library_sha256", PIN["wheel"]["x86_64"]["library_sha256"])
    done = seeded.flake("build --no-link -L", ".#nccl", flake=other)
    assert done.returncode != 0
    assert "libnccl.so.2: FAILED" in done.stderr


def test_a_wheel_with_other_bytes_is_refused(nix, checkout, tmp_path, wheel):
    """A file of the pinned name with one byte more gets another store path, which the flake never asks for."""
    forged = tmp_path / wheel.name
    with wheel.open("rb") as source, forged.open("wb") as target:
        shutil.copyfileobj(source, target)
        target.write(b"\0")
    added = nix.run("nix-store", "--add-fixed", "sha256", str(forged)).stdout.strip()
    wanted = nix.flake("eval --raw", ".#nccl.src.outPath", flake=checkout)
    assert wanted.returncode == 0, wanted.stderr
    assert Path(added).name.endswith(wheel.name)
    assert Path(wanted.stdout).name.endswith(wheel.name)
    assert added != wanted.stdout


def tamper(checkout: Path, key: str, digest: str) -> None:
    pin = checkout / "env" / "nccl.toml"
    text = pin.read_text(encoding="utf-8")
    changed = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    assert f'{key} = "{digest}"' in text
    pin.write_text(text.replace(f'{key} = "{digest}"', f'{key} = "{changed}"'), encoding="utf-8")
