"""Host memory of an offload: two chunks above the baseline while it runs, the tensors' own bytes given back after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
CHUNK = 16 * MIB
TENSORS = 256 * MIB
SLACK = 12 * MIB
"""Stacks and arenas of the worker threads and page tables; far below one more chunk of slack for each rank."""

PROGRAM = """
import json, os, sys, threading, time
from pathlib import Path
import torch
from miles_hpc.filesystem import resident_bytes
from miles_hpc.node.page_cache import cgroup_file_bytes
from miles_hpc.trainer.disk_offload import DiskOffload

path, mode, total, chunk = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
page = os.sysconf("SC_PAGE_SIZE")

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * page

def locked():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmLck:", "VmPin:")))

def charged():
    found = cgroup_file_bytes()
    return 0 if found is None else found[0]

class Peak(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.rss = self.cached = self.locked = 0
        self.done = threading.Event()
        self.start()
    def run(self):
        while not self.done.wait(0.002):
            self.rss = max(self.rss, rss())
            self.locked = max(self.locked, locked())
            if path.exists():
                self.cached = max(self.cached, resident_bytes(path))
    def stop(self):
        self.done.set()
        self.join()
        return self

tensors = [torch.randint(0, 256, (total // 16,), dtype=torch.uint8) for _ in range(16)]
warm = Peak(); warm.stop()
baseline, charged_before, locked_before = rss(), charged(), locked()
offload = DiskOffload(path, device=torch.device("cpu"), chunk_bytes=chunk, mode=mode)
peak = Peak(); offload.offload(tensors); peak.stop()
out = {"baseline": baseline, "peak_out": peak.rss, "asleep": rss(), "cached_peak_out": peak.cached,
       "cached_left_out": resident_bytes(path), "staging": offload.staging_bytes,
       "charged_left": charged() - charged_before, "locked_out": peak.locked - locked_before}
peak = Peak(); offload.onload(); peak.stop()
out |= {"peak_in": peak.rss, "cached_peak_in": peak.cached, "cached_left_in": resident_bytes(path),
        "locked_in": peak.locked - locked_before}
offload.close()
out["closed"] = rss()
print(json.dumps(out))
"""


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_two_chunks_are_all_the_host_memory_an_offload_takes(tmp_path, mode):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "f"), mode, str(TENSORS), str(CHUNK)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["staging"] <= 2 * CHUNK
    assert seen["peak_out"] - seen["baseline"] <= 2 * CHUNK + SLACK
    assert seen["peak_in"] - seen["baseline"] <= 2 * CHUNK + SLACK
    assert seen["asleep"] <= seen["baseline"] - TENSORS + 2 * CHUNK + SLACK
    assert seen["closed"] <= seen["baseline"] + SLACK
    assert seen["cached_left_out"] == seen["cached_left_in"] == 0
    assert max(seen["locked_out"], seen["locked_in"]) <= 2 * CHUNK
    limit = 0 if mode == "direct" else 2 * CHUNK
    assert seen["cached_peak_out"] <= limit
    # Read-ahead of a buffered read may run past what was asked for; direct reads never touch the cache.
    assert seen["cached_peak_in"] <= 2 * limit


def _memory_cgroup() -> Path | None:
    """Return the folder in which cgroups with a memory limit can be made here, or None."""
    if os.geteuid() != 0:
        return None
    for root, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        child = root / f"miles-hpc-probe-{os.getpid()}"
        try:
            child.mkdir()
        except OSError:
            continue
        usable = (child / file).exists()
        child.rmdir()
        if usable:
            return root
    return None


@pytest.mark.skipif(
    _memory_cgroup() is None, reason="makes a memory cgroup: needs root and a writable one"
)
def test_the_cgroup_is_charged_no_more_than_that(tmp_path):
    """The kernel's own count of all memory, page cache included, over a whole run: what a Slurm limit would see."""
    root = _memory_cgroup()
    assert root is not None
    group = root / f"miles-hpc-test-{os.getpid()}"
    group.mkdir()
    peak_file = group / "memory.max_usage_in_bytes"
    peak_file = peak_file if peak_file.exists() else group / "memory.peak"
    join = "import os; open(os.environ['GROUP'], 'w').write(str(os.getpid()))\n"
    try:
        peaks = {}
        for mode in ("none", "direct", "buffered"):
            program = join + PROGRAM
            if mode == "none":  # the same process without the offload: the baseline
                program = program.split("warm = Peak()")[0] + "print('{}')"
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    program,
                    str(tmp_path / mode),
                    mode,
                    str(TENSORS),
                    str(CHUNK),
                ],
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GROUP": str(group / "cgroup.procs")},
            )
            assert done.returncode == 0, done.stderr
            # In a cgroup of its own nobody else's page cache is in this figure.
            assert json.loads(done.stdout).get("charged_left", 0) <= CHUNK
            peaks[mode] = int(peak_file.read_text())
            if peak_file.name == "memory.max_usage_in_bytes":
                peak_file.write_text("0")
    finally:
        group.rmdir()
    assert peaks["direct"] - peaks["none"] <= 2 * CHUNK + 2 * SLACK
    # Write-behind holds what is being written twice: staged, and in the page cache until it is on the disk.
    assert peaks["buffered"] - peaks["none"] <= 4 * CHUNK + 2 * SLACK
