"""GPU memory by process, with a library of the same C interface compiled for the test."""

import shutil
import subprocess

import pytest

from miles_hpc.node.gpu_memory import open_gpus

pytestmark = pytest.mark.timeout(60)

SOURCE = r"""
#include <stdlib.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
static int failing(const char *name) { const char *set = getenv("FAKE_NVML_FAILS"); return set && *set == *name; }
int nvmlInit_v2(void) { return failing("init") ? 9 : 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(index + 1ul); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
  memory->total = 1000; memory->used = 400 * (unsigned long)device; memory->free = 1000 - memory->used; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, process_t *found) {
  if (failing("processes")) return 3;
  if (*count < 3) return 7;
  *count = 3;
  found[0] = (process_t){11, 100 * (unsigned long)device, ~0u, ~0u};
  found[1] = (process_t){12, 30, ~0u, ~0u};
  found[2] = (process_t){99, 50, ~0u, ~0u};
  return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    compiler = shutil.which("cc")
    assert compiler is not None, "this test needs a C compiler"
    argv = [compiler, "-shared", "-fPIC", "-o", str(folder / "nvml.so"), str(folder / "nvml.c")]
    subprocess.run(argv, check=True, timeout=30)
    return str(folder / "nvml.so")


def test_each_gpu_has_the_sum_of_the_jobs_own_processes(library):
    reader = open_gpus(library)
    assert reader is not None
    first, second = reader.read({11, 12})
    assert (first.index, first.job_bytes, first.processes) == (0, 130, ((11, 100), (12, 30)))
    assert (second.index, second.job_bytes, second.processes) == (1, 230, ((11, 200), (12, 30)))


def test_pids_of_another_namespace_count_as_the_job(library):
    reader = open_gpus(library)
    assert reader is not None
    assert [(use.job_bytes, use.processes) for use in reader.read({5})] == [(400, ()), (800, ())]


def test_a_library_that_does_not_list_processes_still_tells_what_is_used(library, monkeypatch):
    monkeypatch.setenv("FAKE_NVML_FAILS", "processes")
    reader = open_gpus(library)
    assert reader is not None
    assert [use.job_bytes for use in reader.read({11})] == [400, 800]


def test_no_library_no_driver_and_a_foreign_library_give_no_figures(library, monkeypatch):
    assert open_gpus("libno-such-thing.so.1") is None
    assert open_gpus("libc.so.6") is None
    monkeypatch.setenv("FAKE_NVML_FAILS", "init")
    assert open_gpus(library) is None
