"""The NCCL proof and the interpreter's report, in processes with and without the library."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.probe.interpreter import find_packaged_nccl, inspect
from miles_hpc.probe.nccl_hook import prove_nccl

ROOT = Path(__file__).resolve().parents[3]
PROVE = (
    "import json, dataclasses; from miles_hpc.probe.nccl_hook import prove_nccl; "
    "print(json.dumps(dataclasses.asdict(prove_nccl())))"
)


@pytest.fixture(scope="module")
def library() -> Path:
    path = find_packaged_nccl()
    if path is None:
        pytest.fail("nvidia-nccl-cu13 is not installed; install env/requirements")
    return path


def run(argv: list[str], **environ: str) -> dict:
    done = subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout)


def test_without_the_library_nothing_is_proved():
    proof = prove_nccl()
    assert (proof.version_code, proof.library, proof.mapped) == (None, None, [])


def test_a_preloaded_library_answers_through_the_global_scope(library):
    proof = run(["-c", PROVE], LD_PRELOAD=str(library))
    assert proof == {
        "version_code": 23007,
        "library": str(library),
        "mapped": [str(library.resolve())],
    }


def test_a_preload_that_cannot_be_opened_is_seen_though_the_program_runs(tmp_path):
    proof = run(["-c", PROVE], LD_PRELOAD=str(tmp_path / "none.so"))
    assert (proof["version_code"], proof["library"]) == (None, None)


def test_the_interpreter_reports_ray_and_the_packaged_library(library):
    report = run(["-m", "miles_hpc.probe.interpreter"])
    assert report["nccl_path"] == str(library)
    assert report["nccl_code"] == 23007
    assert report["ray"]
    assert report["python"].startswith("3.")


def test_a_broken_library_is_an_error_in_the_report(tmp_path):
    spoiled = tmp_path / "libnccl.so.2"
    spoiled.write_text("no library")
    report = inspect(str(spoiled))
    assert report["nccl_code"] is None
    assert report["nccl_error"]
    assert inspect("--no-nccl")["nccl_path"] is None


def test_the_probe_does_not_import_ray():
    source = (
        "import sys; from miles_hpc.probe.interpreter import inspect; inspect('--no-nccl'); "
        "print(int('ray' in sys.modules))"
    )
    assert run(["-c", source]) == 0
