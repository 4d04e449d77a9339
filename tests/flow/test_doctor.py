"""`miles-hpc doctor --cluster local` for real: agents on this machine, without Slurm."""

import json
import shlex
import sys

import pytest

from tests.fakes.submission import SPEC, miles_hpc

pytestmark = pytest.mark.timeout(120)

CPU = ("--set", 'cluster.device="cpu"')


def doctor(tmp_path, *arguments):
    runs = f"job.run_root={json.dumps(str(tmp_path / 'runs'))}"
    return miles_hpc("doctor", "--cluster", "local", "--set", runs, *arguments, timeout_s=100)


def test_this_machine_is_checked_without_a_spec_and_without_slurm(tmp_path):
    done = doctor(tmp_path, *CPU, "--nodes", "2", "--set", 'offload.scratch_min_free="1MiB"')
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 nodes fit: 0 faults" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_a_spec_names_and_this_machine_has_not_is_a_fault(tmp_path):
    done = doctor(
        tmp_path,
        str(SPEC),
        *("--set", 'model.weights="checkpoint"', "--set", 'model.hf_checkpoint="/no/such/model"'),
        *("--set", 'offload.scratch_root="/dev/shm"', "--json"),
    )
    assert done.returncode == 10, done.stderr + done.stdout
    faults = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "fault"]
    assert [(fault["node"], fault["check"]) for fault in faults] == [
        ("local0", "scratch"),
        ("local0", "model and data"),
        ("local1", "scratch"),
        ("local1", "model and data"),
    ]
    assert "/no/such/model: No such file or directory" in faults[1]["found"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_specs_secrets_are_demanded_and_hidden_as_in_a_job(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nenv > {tmp_path}/environment.$$\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    arguments = (
        *CPU,
        *("--set", 'secrets.names=["DOCTOR_CANARY"]'),
        *("--set", f"cluster.python={json.dumps(str(python))}"),
        *("--set", 'offload.scratch_min_free="1MiB"'),
    )
    monkeypatch.delenv("DOCTOR_CANARY", raising=False)
    refused = doctor(tmp_path, *arguments)
    assert refused.returncode == 4, refused.stderr
    assert "DOCTOR_CANARY" in refused.stderr
    monkeypatch.setenv("DOCTOR_CANARY", "canary-51ca")
    done = doctor(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    dumps = list(tmp_path.glob("environment.*"))
    assert dumps
    assert [path for path in dumps if "canary-51ca" in path.read_text(errors="replace")] == []
    assert list((tmp_path / "runs").iterdir()) == []
