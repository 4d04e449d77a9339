"""What the GPU probe reads, from a library of NVML's C interface compiled for the test: no real GPU has any part in it."""

import json
import subprocess
import sys

import pytest

from miles_hpc.probe.gpus import inspect
from miles_hpc.run.gpu_state import gpu_report_from
from tests.fakes.nvml import build_library

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build_library(tmp_path_factory.mktemp("nvml"))


def test_every_figure_is_read_into_its_place(library):
    report = gpu_report_from(inspect(library))
    assert (report.error, report.driver, report.cuda) == ("", "580.82.07", 13000)
    first, second = report.gpus
    assert (first.index, first.uuid, first.used_bytes) == (0, "GPU-aa", 300)
    assert (second.index, second.uuid, second.used_bytes) == (1, "GPU-bb", 301)
    assert (second.code, second.name, second.memory_bytes) == (0, "NVIDIA H200", 1000)
    assert (second.ecc_on, second.ecc_uncorrected) == (True, 5_000_000_001)
    assert (second.remapped_rows, second.remap_pending, second.remap_failed) == (2, True, False)
    assert (second.throttle, second.clock_mhz, second.max_clock_mhz) == (0x41, 345, 1980)
    assert (second.celsius, second.links_up, second.links_down) == (88, 3, 1)
    assert (second.fabric_state, second.fabric_status, second.recovery_action) == (3, 0, 1)


def test_what_the_gpu_or_the_library_does_not_tell_is_none(library):
    second = gpu_report_from(inspect(library)).gpus[1]
    assert second.retired_pending is None  # NVML_ERROR_NOT_SUPPORTED
    assert second.mig_on is None  # an older library without this function


@pytest.mark.parametrize(("kind", "code"), [("lost", 15), ("reset required", 16)])
def test_a_gpu_that_is_gone_has_its_code(library, monkeypatch, kind, code):
    monkeypatch.setenv("FAKE_NVML", kind)
    assert [gpu.code for gpu in gpu_report_from(inspect(library)).gpus] == [0, code]


def test_no_library_no_driver_and_a_foreign_library_are_told(library, monkeypatch):
    assert "libno-such-thing.so.1" in str(inspect("libno-such-thing.so.1")["error"])
    assert inspect("libc.so.6")["error"] == "libc.so.6: it has no nvmlInit_v2"
    monkeypatch.setenv("FAKE_NVML", "no driver")
    assert inspect(library)["error"] == f"{library}: nvmlInit_v2 returned 9"


def test_a_library_with_nothing_but_its_gpus_still_counts_them(tmp_path):
    bare = build_library(
        tmp_path,
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = device; return 0; }\n",
    )
    report = gpu_report_from(inspect(bare))
    assert [(gpu.code, gpu.name, gpu.memory_bytes) for gpu in report.gpus] == [(0, None, None)] * 2


def test_the_command_prints_one_json_object(library):
    done = subprocess.run(
        [sys.executable, "-m", "miles_hpc.probe.gpus", library],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert len(json.loads(done.stdout)["gpus"]) == 2
