"""The memory of a local run at its peak: the sum of PSS of every process that belongs to it, sampled while it lives.

    python tests/bench/peak_memory.py RUN_ROOT -- miles-hpc submit jobs/demo.toml --cluster local --wait --set job.run_root=RUN_ROOT

A process belongs to the run when its command line or its environment names a path below RUN_ROOT: agents, Ray, actors, driver.
"""

import subprocess
import sys
import time
from pathlib import Path

SAMPLE_S = 0.5


def belongs(process: Path, root: bytes) -> bool:
    """Say whether a /proc folder is of a process that names `root`."""
    return any(root in (process / name).read_bytes() for name in ("cmdline", "environ"))


def pss_by_title(root: bytes) -> dict[str, int]:
    """Return PSS in bytes by process title and pid, for all processes of the run."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not belongs(process, root):
                continue
            rollup = (process / "smaps_rollup").read_text()
            title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80].strip()
        except OSError:
            # It ended while we looked.
            continue
        pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
        found[f"{title} ({process.name})"] = int(pss.split()[1]) * 1024
    return found


def main(argv: list[str]) -> int:
    """Run the command after `--` and print the peak and its parts."""
    root = str(Path(argv[0]).resolve()).encode()
    started = time.monotonic()
    command = subprocess.Popen(argv[2:])
    peak: dict[str, int] = {}
    peak_s = 0.0
    while command.poll() is None:
        sample = pss_by_title(root)
        if sum(sample.values()) > sum(peak.values()):
            peak, peak_s = sample, time.monotonic() - started
        time.sleep(SAMPLE_S)
    print(f"exit code {command.returncode} after {time.monotonic() - started:.0f} s")
    print(f"peak {sum(peak.values()) / 2**20:.0f} MiB after {peak_s:.0f} s, {len(peak)} processes")
    for title, pss in sorted(peak.items(), key=lambda item: -item[1]):
        print(f"{pss / 2**20:8.0f} MiB  {title}")
    return command.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
