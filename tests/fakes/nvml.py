"""A library of NVML's C interface with two GPUs, compiled for a test.

FAKE_NVML says what they are like: "sound", "lost" (the second fell off the bus), "reset required", "no driver"; without it
each has every ailment that does not stop it from answering.
"""

import shutil
import subprocess
from pathlib import Path

from miles_hpc.probe.gpus import LIBRARY

SOURCE = r"""
#include <stdlib.h>
#include <string.h>
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric_t;
typedef struct { unsigned field, scope; long long stamp, latency; unsigned kind; int code; union { double d; unsigned u; u64 l; } value; } value_t;
static int is(const char *name) { const char *set = getenv("FAKE_NVML"); return set && strcmp(set, name) == 0; }
static int sound(void) { return is("sound"); }
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
  *count = sound() ? 0 : 5000000000ull + number(device); return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *soft, unsigned *hard, unsigned *pending, unsigned *failed) {
  *soft = 7; *hard = 2; *pending = !sound(); *failed = 0; return 0;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, unsigned *pending) { return 3; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, u64 *reasons) { *reasons = sound() ? 0x1 : 0x41; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 345 : 0; return 0; }
int nvmlDeviceGetMaxClockInfo(void *device, int kind, unsigned *mhz) { *mhz = kind == 1 ? 1980 : 0; return 0; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { *celsius = 88; return 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, unsigned *active) {
  if (link >= 4) return 3;
  *active = sound() || link != 2; return 0;
}
int nvmlDeviceGetGpuFabricInfo(void *device, fabric_t *fabric) { fabric->state = 3; fabric->status = 0; return 0; }
int nvmlDeviceGetFieldValues(void *device, int count, value_t *values) {
  if (count != 1 || values[0].field != 230) return 2;
  values[0].code = 0; values[0].value.l = ~0ull; values[0].value.u = !sound(); return 0;
}
"""


def build_library(folder: Path, source: str = SOURCE) -> str:
    """Compile `source` in `folder` under the name that the probe looks for, and return its path."""
    (folder / "nvml.c").write_text(source)
    compiler = shutil.which("cc")
    assert compiler is not None, "this test needs a C compiler"
    library = folder / LIBRARY
    argv = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "nvml.c")]
    subprocess.run(argv, check=True, timeout=30)
    return str(library)
