"""A real local run that is longer than its time limit: it saves before the end, says so, and ends with the code for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.paths import RunDir, packaged
from miles_hpc.run.events import read_events
from miles_hpc.run.resume import latest_checkpoint, read_verdict

pytestmark = [pytest.mark.trainer, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


def test_a_local_run_saves_before_its_limit_and_says_that_nothing_starts_it_again(tmp_path):
    settings = (
        f"job.run_root={json.dumps(str(tmp_path))}",
        'job.time_limit="4min"',
        'agent.save_before_limit="150s"',
        "train.num_steps=100000",
        "checkpoint.save_interval=50000",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    spec = str(packaged("jobs") / "demo_tiny.toml")
    done = subprocess.run(
        [sys.executable, "-m", "miles_hpc", "submit", spec, "--cluster", "local", "--wait", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    run = RunDir(Path(done.stdout.strip()))
    assert done.returncode == 14, done.stderr
    verdict = read_verdict(run.attempt(1))
    assert verdict is not None
    assert (verdict.state, verdict.driver_exit_code, verdict.spends_attempt) == (
        "FAILED", 75, False,
    )  # fmt: skip
    [stopped] = [e["step"] for e in read_events(run.events) if e["kind"] == "stopped_on_request"]
    assert latest_checkpoint(run) == run.checkpoints / f"step-{stopped}"
    assert f"a further attempt continues from step-{stopped}" in verdict.reason
    assert "the local cluster starts no job again" in verdict.reason
