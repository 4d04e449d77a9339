"""What memory sampling costs: processor time of each source, sampled once a second beside a tree of processes.

    python tests/bench/sampling.py [NUM_PROCESSES [SECONDS]]

The children are idle interpreters, and the scratch folder holds 64 files. Prints one line a source and the sum in percent of a core;
a source that this machine lacks (NVML, a job's cgroup) is left out or stood in for by the cgroup that is here.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from miles_hpc.node.gpu_memory import open_gpus
from miles_hpc.node.host_memory import MemoryCgroup, OwnProcesses
from miles_hpc.node.sampling import MemoryReader
from miles_hpc.run.samples import SampleLog

CHILD = "import sys, threading; [threading.Thread(target=sys.stdin.read).start() for _ in range(8)]"


def here() -> MemoryCgroup | None:
    """Return a memory cgroup of this machine, whoever's it is: reading it costs the same."""
    for folder, version in (("/sys/fs/cgroup/memory", 1), ("/sys/fs/cgroup", 2)):
        if (Path(folder) / "memory.stat").is_file():
            return MemoryCgroup(folder=Path(folder), version=version)
    return None


def measure(name: str, reader: MemoryReader, seconds: float, log: SampleLog) -> None:
    """Sample once a second and print what each source took."""
    begin_s, cpu_s, taken, lines = time.monotonic(), time.thread_time(), 0, 0
    while time.monotonic() - begin_s < seconds:
        sample = reader.read()
        if sample is not None:
            taken += 1
            lines += log.append(sample)
        time.sleep(1.0)
    of_s = time.monotonic() - begin_s
    total_s = time.thread_time() - cpu_s
    print(
        f"{name}: {taken} samples in {of_s:.0f} s, {lines} lines, {log.path.stat().st_size} bytes"
    )
    paces = {"host": reader.host_pace, "gpu": reader.gpu_pace, "scratch": reader.scratch_pace}
    for source, pace in paces.items():
        print(f"  {source:<8}{1000 * pace.cpu_s / max(1, taken):8.3f} ms a sample")
    print(f"  all     {100 * total_s / of_s:8.3f} % of a core")


def main(argv: list[str]) -> None:
    """Start the children and measure both ways of reading the host."""
    num, seconds = int(argv[0]) if argv else 24, float(argv[1]) if len(argv) > 1 else 60.0
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE) for _ in range(num)
    ]
    try:
        with tempfile.TemporaryDirectory() as temp:
            scratch = Path(temp) / "scratch"
            scratch.mkdir()
            for index in range(64):
                (scratch / f"rank-{index}").write_bytes(b"x" * 4096)
            with os.scandir("/proc") as entries:
                living = sum(entry.name.isdigit() for entry in entries)
            gpus = open_gpus()
            print(
                f"{num} children, {living} processes on the machine, {len(gpus.devices) if gpus else 0} GPUs"
            )
            for name, cgroup in (("processes", None), ("cgroup", here())):
                if name == "cgroup" and cgroup is None:
                    continue
                reader = MemoryReader(
                    cgroup=cgroup,
                    processes=OwnProcesses(os.getpid()),
                    gpus=gpus,
                    resources=SimpleNamespace(scratch=SimpleNamespace(path=scratch)),
                )
                measure(name, reader, seconds, SampleLog(Path(temp) / f"{name}.jsonl"))
    finally:
        for child in children:
            child.communicate(timeout=30)


if __name__ == "__main__":
    main(sys.argv[1:])
