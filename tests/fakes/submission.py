"""The command line as a user runs it, with the node agent replaced by the stub in the job's frozen code."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from miles_hpc.paths import RunDir

ROOT = Path(__file__).resolve().parents[2]
SPEC = ROOT / "jobs" / "demo_tiny.toml"
STUB = Path(__file__).with_name("stub_node.py")

# The command line with one step more: between writing and submitting the folder, the stub takes the agent's place.
_WITH_STUB = """
import shutil, sys
from miles_hpc import cli
from miles_hpc.launch import bundle

stub, told = sys.argv[1:3]
write = bundle.write_run_folder

def write_with_stub(*arguments, **named):
    run, handoff = write(*arguments, **named)
    shutil.copy(stub, run.code / "miles_hpc" / "node" / "__main__.py")
    (run.root / "stub.json").write_text(told)
    return run, handoff

bundle.write_run_folder = write_with_stub
sys.argv[1:3] = []
cli.main()
"""


def command(*arguments: str, stub: dict | None = None) -> list[str]:
    """Return the argv of the command line; `stub` says what the job's node agents do."""
    if stub is None:
        return [sys.executable, "-m", "miles_hpc", *arguments]
    return [sys.executable, "-c", _WITH_STUB, str(STUB), json.dumps(stub), *arguments]


def miles_hpc(
    *arguments: str, stub: dict | None = None, timeout_s: float = 60.0, **named
) -> subprocess.CompletedProcess:
    """Run the command line to its end."""
    environ = {**named.pop("env", os.environ), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command(*arguments, stub=stub),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environ,
        **named,
    )


def only_run(run_root: Path) -> RunDir:
    """Return the one run folder below `run_root`."""
    (root,) = [path for path in run_root.iterdir() if path.is_dir()]
    return RunDir(root)


def wait_for(condition, timeout_s: float = 30.0):
    """Return the first true value of `condition`, asked 20 times a second."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, condition
        time.sleep(0.05)
    return value
