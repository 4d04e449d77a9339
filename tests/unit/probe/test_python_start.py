"""What every Python of a job does first, in real processes, with compiled stand-ins of NCCL and torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.probe.nccl_hook import PYTHON_START, process_role
from tests.fakes.nccl import make_nccl, make_torch

ROOT = Path(__file__).resolve().parents[3]
USE_TORCH = "import torch; print(torch.used_nccl())"


@pytest.fixture
def pinned(tmp_path):
    return make_nccl(tmp_path / "pinned", 23007)


@pytest.fixture
def own(tmp_path):
    return make_nccl(tmp_path / "own", 22809)


@pytest.fixture
def start(tmp_path, pinned):
    """Return a function that runs Python source as a process of the job and returns what it printed and proved."""

    def run(source, *folders, options=(), **environ):
        variables = {
            "MILES_HPC_NCCL": str(pinned),
            "MILES_HPC_EVENTS": str(tmp_path / "events.jsonl"),
            "MILES_HPC_NODE": "n1",
            "PYTHONPATH": os.pathsep.join(map(str, (PYTHON_START, *folders, ROOT))),
        }
        done = subprocess.run(
            [sys.executable, *options, "-c", source],
            env={**os.environ, **variables, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        events = tmp_path / "events.jsonl"
        lines = events.read_text().splitlines() if events.exists() else []
        return done.stdout.splitlines(), [json.loads(line) for line in lines]

    return run


@pytest.mark.parametrize("by", ["rpath", "runpath", "path, global", "path, local"])
def test_torch_calls_the_pinned_library_though_the_preload_was_dropped(
    tmp_path, start, pinned, own, by
):
    torch = make_torch(tmp_path / "site", own, by)
    printed, proofs = start(USE_TORCH, torch, LD_PRELOAD="")
    assert printed == ["23007"]
    assert [(p["version_code"], p["library"]) for p in proofs] == [(23007, str(pinned))]
    assert proofs[0]["kind"] == "nccl_proof"
    assert proofs[0]["node"] == "n1"
    assert proofs[0]["role"].endswith("-c")


@pytest.mark.parametrize("by", ["rpath", "path, global"])
def test_without_the_hook_torch_calls_its_own(tmp_path, start, own, by):
    torch = make_torch(tmp_path / "site", own, by)
    assert start(USE_TORCH, torch, PYTHONPATH=str(torch)) == (["22809"], [])


def test_a_preloaded_library_is_proved_before_anything_is_imported(start, pinned):
    _, proofs = start("pass", LD_PRELOAD=str(pinned))
    assert [(p["version_code"], p["library"], p["mapped"]) for p in proofs] == [
        (23007, str(pinned), [str(pinned)])
    ]


def test_another_preloaded_library_is_told_and_not_hidden_by_the_pinned_one(tmp_path, start, own):
    torch = make_torch(tmp_path / "site", own)
    printed, proofs = start(USE_TORCH, torch, LD_PRELOAD=str(own))
    assert printed == ["22809"]
    assert [(p["version_code"], p["library"]) for p in proofs] == [(22809, str(own))]


def test_spawned_and_forked_children_prove_themselves(tmp_path, start, own, pinned):
    torch = make_torch(tmp_path / "site", own)
    source = (
        "import os, subprocess, sys, torch\n"
        "subprocess.run([sys.executable, '-c', 'import torch; print(torch.used_nccl())'], check=True)\n"
        "pid = os.fork()\n"
        "os._exit(0) if pid == 0 else os.waitpid(pid, 0)\n"
    )
    printed, proofs = start(source, torch, LD_PRELOAD="")
    assert printed == ["23007"]
    assert len({(p["pid"], p["start_ticks"]) for p in proofs}) == 3
    assert {p["library"] for p in proofs} == {str(pinned)}


def test_a_torch_without_cuda_is_left_alone(tmp_path, start, own):
    torch = make_torch(tmp_path / "site", own)
    (torch / "torch" / "lib" / "libtorch_cuda.so").unlink()
    (torch / "torch" / "__init__.py").write_text("")
    source = "import torch, sys; print('libnccl' in open('/proc/self/maps').read())"
    assert start(source, torch, LD_PRELOAD="") == (["False"], [])


def test_looking_for_torch_loads_nothing(tmp_path, start, own):
    torch = make_torch(tmp_path / "site", own)
    source = (
        "import importlib.util as u; print(bool(u.find_spec('torch')), 'libnccl' in open('/proc/self/maps').read())\n"
        "print(u.find_spec('no_such_module'))"
    )
    assert start(source, torch, LD_PRELOAD="") == (["True False", "None"], [])


def test_the_sites_own_sitecustomize_runs_and_is_the_one_that_others_import(tmp_path, start):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("NAME = 'the site'; print('ran')")
    source = "import sitecustomize; print(sitecustomize.NAME, sitecustomize.__file__)"
    printed, _ = start(source, tmp_path / "site")
    assert printed == ["ran", f"the site {tmp_path / 'site' / 'sitecustomize.py'}"]


def test_a_job_without_nccl_pays_nothing(start):
    source = "import sys; print(sorted({'ctypes', 'json', 'miles_hpc'} & set(sys.modules)))"
    assert start(source, MILES_HPC_NCCL="") == (["[]"], [])


def test_a_process_that_uses_no_nccl_imports_nothing_of_ours(start):
    source = "import sys; print(sorted({'ctypes', 'json', 'miles_hpc'} & set(sys.modules)))"
    assert start(source) == (["[]"], [])


def test_a_library_that_does_not_load_is_said_and_torch_goes_on(tmp_path, own, pinned):
    torch = make_torch(tmp_path / "site", own)
    environ = {
        "MILES_HPC_NCCL": str(tmp_path / "none" / "libnccl.so.2"),
        "MILES_HPC_EVENTS": str(tmp_path / "events.jsonl"),
        "PYTHONPATH": os.pathsep.join(map(str, (PYTHON_START, torch, ROOT))),
    }
    done = subprocess.run(
        [sys.executable, "-c", USE_TORCH],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "22809\n"
    assert "the job's NCCL cannot be loaded" in done.stderr
    (proof,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert proof["library"] == str(own)


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (["ray::TrainerHost.build"], "ray::TrainerHost.build"),
        (["sglang::scheduler_TP0 --key secret"], "sglang::scheduler_TP0"),
        (["/x/bin/python3.11", "-u", "/x/train.py", "--wandb-key", "s"], "train.py"),
        (["python", "-m", "sglang.launch_server", "--api-key", "s"], "python sglang.launch_server"),
        (["python3", "-c", "secret = 1"], "python3 -c"),
        (["/opt/all_reduce_perf", "-b", "8"], "all_reduce_perf"),
        (["python3"], "python3"),
        ([], "?"),
        ([""], "?"),
    ],
)
def test_a_role_names_a_process_without_its_arguments(argv, role):
    assert process_role(argv) == role
