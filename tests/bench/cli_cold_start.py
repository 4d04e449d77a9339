"""How long a command takes on a login node, beside what importing pydantic alone costs there.

    python tests/bench/cli_cold_start.py [--runs 15] [--spec jobs/qwen38_full.toml]

Runs are interleaved, so that a slow spell of the machine hits all alike; it prints medians and their ratio to the
yardstick. Every run is a fresh process with a warm file cache; the first round is thrown away.
"""

import argparse
import compileall
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def seconds_of(argv: list[str]) -> float:
    """Return the wall clock of one run, which must succeed."""
    started = time.perf_counter()
    subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--spec", default="jobs/qwen38_full.toml")
    arguments = parser.parse_args()
    # As an installation leaves the package: compiled. Otherwise a run compiles every module that it imports.
    compileall.compile_dir(ROOT / "miles_hpc", quiet=1)
    output = Path(tempfile.mkdtemp(prefix="cold-start-"))
    command = [sys.executable, "-m", "miles_hpc"]
    cases = {
        "python -c 'import pydantic'": [sys.executable, "-c", "import pydantic"],
        "miles-hpc --version": [*command, "--version"],
        "miles-hpc check": [*command, "check", arguments.spec],
        "miles-hpc plan --json": [*command, "plan", arguments.spec, "--json"],
        "miles-hpc render": [*command, "render", arguments.spec, "-o", str(output / "run")],
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(arguments.runs + 1):
        for name, argv in cases.items():
            shutil.rmtree(output / "run", ignore_errors=True)
            seconds = seconds_of(argv)
            if turn:
                times[name].append(seconds)
    shutil.rmtree(output)
    yardstick = statistics.median(times["python -c 'import pydantic'"])
    print(f"{arguments.spec}, {arguments.runs} runs, {sys.version.split()[0]}")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(
            f"{name:<30} {middle * 1000:7.0f} ms  {middle / yardstick:5.2f} x  "
            f"(min {min(seconds) * 1000:.0f}, max {max(seconds) * 1000:.0f})"
        )


if __name__ == "__main__":
    main()
