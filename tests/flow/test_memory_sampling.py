"""A real local run of demo_tiny leaves memory samples by phase, `report` holds them against the plan, and an alarm can end it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.paths import RunDir, packaged
from miles_hpc.run.events import read_events
from miles_hpc.run.resume import read_verdict
from miles_hpc.run.samples import read_samples

pytestmark = [pytest.mark.trainer, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def miles_hpc(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "miles_hpc", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )


def submit(tmp_path, *settings: str) -> tuple[subprocess.CompletedProcess, RunDir]:
    done = miles_hpc(
        "submit",
        str(packaged("jobs") / "demo_tiny.toml"),
        "--cluster",
        "local",
        "--wait",
        "--set",
        f"job.run_root={json.dumps(str(tmp_path))}",
        *(word for setting in settings for word in ("--set", setting)),
    )
    return done, RunDir(Path(done.stdout.strip()))


def test_a_run_leaves_samples_and_report_holds_them_against_the_plan(tmp_path):
    done, run = submit(tmp_path)
    assert done.returncode == 0, done.stderr
    for node in ("local0", "local1"):
        samples = list(read_samples(run.attempt(1).node_samples(node)))
        assert max(sample.host.anon for sample in samples) > 200 * MIB, node
        assert {sample.host.source for sample in samples} == {"processes"}
        assert any(sample.scratch is not None for sample in samples)
    found = json.loads(miles_hpc("report", str(run.root), "--json").stdout)
    phases = {phase["name"]: phase for phase in found["phases"]}
    planned = {
        phase["name"]: phase["host_bytes_per_node"]
        for phase in json.loads(run.plan.read_text())["memory"]["phases"]
    }
    assert {
        name: phase["planned"]["host_bytes_per_node"]
        for name, phase in phases.items()
        if phase["planned"]
    } == planned
    # Two phases outlast a second on any machine: before the driver's first, and loading.
    for name in ("start", "load"):
        assert [entry["node"] for entry in phases[name]["measured"]] == ["local0", "local1"]
    assert all(entry["host_bytes"] > 200 * MIB for entry in phases["load"]["measured"])
    assert found["alarms"] == []
    text = miles_hpc("report", str(run.root)).stdout
    assert "  load        plan" in text
    assert "local1" in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 100


def test_a_low_alarm_ends_the_job_with_a_verdict_that_names_it(tmp_path):
    done, run = submit(tmp_path, 'agent.memory_alarm="100MiB"', 'agent.on_memory_alarm="stop"')
    assert done.returncode == 11, done.stderr
    verdict = read_verdict(run.attempt(1))
    assert verdict is not None
    assert (verdict.state, verdict.exit_code) == ("FAILED", 11)
    assert "memory alarm: found" in verdict.reason
    assert "expected at most 100.0 MiB" in verdict.reason
    alarms = [event for event in read_events(run.events) if event["kind"] == "memory_alarm"]
    assert alarms
    assert all(event["host_bytes"] > event["limit_bytes"] == 100 * MIB for event in alarms)
    assert {event["action"] for event in alarms} == {"stop"}
    assert "alarm on local" in miles_hpc("report", str(run.root)).stdout
