"""What the GPU probe reads, from a library of NVML's C interface compiled for the test: no real GPU has any part in it."""

import json
import shutil
import subprocess
import sys

import pytest

from miles_hpc.probe.gpus import inspect
from miles_hpc.run.gpu_state import gpu_report_from

pytestmark = pytest.mark.timeout(60)

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric_t;
typedef struct { unsigned field, scope; long long stamp, latency; unsigned kind; int code; union { double d; unsigned u; u64 l; } value; } value_t;
static int is(const char *name) { const char *set = getenv("FAKE_NVML"); return set && strcmp(set, name) == 0; }
static long number(void *device) { return (long)device - 1; }
int nvmlInit_v2(void) { return is("no driver") ? 9 : 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.82.07", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
  if (is("reset required") && index == 1) return 16;
  *device = (void *)(index + 1ul); return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
  if (is("lost") && number(device) == 1) return 15;
  memory->total = 1000; memory->used = 300 + number(device); memory->free = 0; return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) { strncpy(text, "NVIDIA H200", size); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { strncpy(text, number(device) ? "GPU-bb" : "GPU-aa", size); return 0; }
int nvmlDeviceGetEccMode(void *device, unsigned *now, unsigned *later) { *now = 1; *later = 0; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int since, u64 *count) {
  if (kind != 1 || since != 0) return 2;
  *count = 5000000000ull + number(device); return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *soft, unsigned *hard, unsigned *pending, unsigned *failed) {
  *soft = 7; *hard = 2; *pending = 1; *failed = 0; return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *pending) { return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons) { *reasons = 0x41; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 345 : 0; return 0; }
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1980 : 0; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 88; return 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
  if (link >= 4) return 3;
  *active = link != 2; return 0;
}
int nvmlDeviceGetGpuFabricInfo(void *device, fabric_t *fabric) { fabric->state = 3; fabric->status = 0; return 0; }
int nvmlDeviceGetFieldValues(void *device, int count, value_t *values) {
  if (count != 1 || values[0].field != 230) return 2;
  values[0].code = 0; values[0].value.l = ~0ull; values[0].value.u = 1; return 0;
}
"""


def build(folder, source):
    (folder / "nvml.c").write_text(source)
    compiler = shutil.which("cc")
    assert compiler is not None, "this test needs a C compiler"
    argv = [compiler, "-shared", "-fPIC", "-o", str(folder / "nvml.so"), str(folder / "nvml.c")]
    subprocess.run(argv, check=True, timeout=30)
    return str(folder / "nvml.so")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nvml"), SOURCE)


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
    bare = build(
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
