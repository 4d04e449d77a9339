"""`nix develop` for real: the shells hold what they promise, and NCCL is preloaded in ranks and nowhere else."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_hpc.run.events import Kind, read_events
from tests.fakes.submission import only_run
from tests.nix.conftest import ROOT

pytestmark = pytest.mark.timeout(600)
VENV = Path(sys.executable).parents[1]
VERSION_OF_NCCL = (
    "import ctypes; version = ctypes.c_int(); "
    "ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version)); print(version.value)"
)


def in_shell(nix, shell: str, *argv: str, flake: Path = ROOT):
    variables = {"MILES_HPC_VENV": str(VENV)}
    return nix.flake("develop", f".#{shell}", "-c", *argv, flake=flake, **variables)


def test_the_default_shell_is_light_and_has_the_command(seeded, checkout):
    done = in_shell(seeded, "default", "miles-hpc", "check", "jobs/demo_tiny.toml", flake=checkout)
    assert done.returncode == 0, done.stderr
    where = in_shell(seeded, "default", "bash", "-c", "type -P miles-hpc", flake=checkout)
    assert where.stdout.startswith(f"{seeded.folder}/nix/store/")
    assert not list(checkout.glob(".venv*"))


@pytest.mark.parametrize("shell", ["login", "cpu"])
def test_no_shell_preloads_anything(seeded, shell):
    done = in_shell(seeded, shell, "bash", "-c", "env")
    assert done.returncode == 0, done.stderr
    names = {line.split("=", 1)[0] for line in done.stdout.splitlines()}
    assert not names & {"LD_PRELOAD", "LD_LIBRARY_PATH"}
    assert "PYTHONNOUSERSITE" in names


def test_a_rank_of_the_launcher_has_the_pinned_nccl_and_a_plain_program_has_not(seeded):
    python = [sys.executable, "-c", VERSION_OF_NCCL]
    rank = in_shell(seeded, "cpu", "miles-hpc-rank", *python)
    assert rank.stdout == "23007\n", rank.stderr
    plain = in_shell(seeded, "cpu", "miles-hpc-run", *python)
    assert plain.returncode != 0
    assert "undefined symbol: ncclGetVersion" in plain.stderr


def test_the_launcher_links_the_drivers_own_files_alone(seeded, tmp_path):
    driver, temp = tmp_path / "driver", tmp_path / "temp"
    for folder in (driver, temp):
        folder.mkdir()
    for name in ("libcuda.so.1", "libc.so.6"):
        (driver / name).write_bytes(b"")
    script = f"TMPDIR={temp} MILES_HPC_DRIVER_DIRS={driver} miles-hpc-run printenv LD_LIBRARY_PATH"
    done = in_shell(seeded, "cpu", "bash", "-c", script)
    links = Path(done.stdout.strip().split(":")[1])
    assert {path.name: path.resolve() for path in links.iterdir()} == {
        "libcuda.so.1": driver / "libcuda.so.1"
    }


def test_the_launcher_refuses_a_folder_of_links_that_somebody_else_could_have_made(
    seeded, tmp_path
):
    script = (
        f"mkdir {tmp_path}/other; ln -s {tmp_path}/other {tmp_path}/miles-hpc-driver-$(id -u); "
        f"TMPDIR={tmp_path} miles-hpc-run true"
    )
    done = in_shell(seeded, "cpu", "bash", "-c", script)
    assert done.returncode == 1
    assert "expected this user's own" in done.stderr


@pytest.mark.slow
def test_the_demo_runs_in_the_shell_and_only_ranks_have_the_preload(seeded, tmp_path):
    argv = [
        "nix", "develop", "--no-write-lock-file", "--override-input", "nixpkgs", f"path:{seeded.stub}", ".#cpu", "-c",
        "miles-hpc", "submit", "jobs/demo_tiny.toml", "--cluster", "local", "--wait",
        "--set", f"job.run_root={json.dumps(str(tmp_path))}",
    ]  # fmt: skip
    environ = {**seeded.environ, "MILES_HPC_VENV": str(VENV)}
    log = tmp_path.with_name(f"{tmp_path.name}.log")
    preloaded: dict[str, bool] = {}
    with log.open("wb") as output:
        done = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=output, stderr=output)
        while done.poll() is None:
            preloaded.update(processes_of(tmp_path))
            time.sleep(0.1)
    assert done.returncode == 0, log.read_text(encoding="utf-8")
    events = list(read_events(only_run(tmp_path).events))
    proofs = [event for event in events if event["kind"] == Kind.NCCL_PROOF]
    assert proofs
    with_nccl = {name for name, is_preloaded in preloaded.items() if is_preloaded}
    assert with_nccl
    assert all("python" in name or name.startswith("ray::") for name in with_nccl), with_nccl
    assert any(not is_preloaded and "raylet" in name for name, is_preloaded in preloaded.items())
    assert any(
        not is_preloaded and "miles_hpc.node" in name for name, is_preloaded in preloaded.items()
    )


def processes_of(run_root: Path) -> dict[str, bool]:
    """Return the job's processes by command line, and whether each was started with NCCL preloaded."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if any(e.startswith(b"MILES_HPC_RUN_DIR=" + bytes(run_root)) for e in environ) or (
            "miles_hpc.node" in command and str(run_root) in command
        ):
            preload = next((e for e in environ if e.startswith(b"LD_PRELOAD=")), b"")
            found[command] = b"libnccl" in preload
    return found
