"""The demo job from its spec to a trained adapter on a real Slurm, by submitit and by plain sbatch of a rendered folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.paths import RunDir
from miles_hpc.run.resume import write_whole
from tests.slurm.jobs import (
    REPOSITORY,
    assert_nothing_left,
    events_of,
    outputs,
    processes_of,
    verdict_of,
    wait_for,
)

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.trainer,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

SPEC = REPOSITORY / "jobs" / "demo_tiny.toml"
SETTINGS = ("--set", "cluster.memory_per_node=2GiB", "--set", "train.num_steps=2")


def miles_hpc(slurm, *arguments: str, timeout_s: float = 800.0) -> subprocess.CompletedProcess:
    """Run the command line as a user of the rig would."""
    path = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
    return subprocess.run(
        [sys.executable, "-c", "from miles_hpc.cli import main; main()", *arguments],
        env={**slurm.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def assert_trained(run: RunDir) -> None:
    """Fail unless the run has done its steps on both nodes, saved, and left nothing."""
    assert verdict_of(run).state == "COMPLETED", outputs(run)
    events = events_of(run)
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2]
    proofs = [event for event in events if event["kind"] == "nccl_proof"]
    assert {event["node"] for event in proofs} == {"g1-n01", "g1-n02"}
    assert (run.checkpoints / "step-2" / "COMPLETE").is_file()
    assert_nothing_left(run)


def test_submit_trains_on_two_nodes_and_returns_the_jobs_exit_code(slurm, tmp_path):
    done = miles_hpc(
        slurm, "submit", str(SPEC), *SETTINGS, "--set", f"job.run_root={tmp_path}", "--wait"
    )
    (root,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    run = RunDir(root)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{outputs(run)}"
    assert str(root) in done.stdout
    assert_trained(run)
    told = json.loads(miles_hpc(slurm, "status", str(root), "--json").stdout)
    assert (told["state"], told["exit_code"], told["driver_exit_code"], told["attempt"]) == (
        "COMPLETED", 0, 0, 1,
    )  # fmt: skip


def test_render_and_plain_sbatch_do_the_same(slurm, tmp_path):
    root = tmp_path / "rendered run"
    done = miles_hpc(slurm, "render", str(SPEC), *SETTINGS, "-o", str(root))
    assert done.returncode == 0, done.stderr
    run = RunDir(root)
    sent = slurm.run("sbatch", "--parsable", str(run.sbatch_script))
    assert sent.returncode == 0, sent.stderr
    record = slurm.wait_for_job(sent.stdout.strip(), timeout_s=600)
    assert record["JobState"] == "COMPLETED", outputs(run)
    assert_trained(run)


def test_cancel_of_a_training_job_leaves_nothing(slurm, tmp_path):
    done = miles_hpc(
        slurm, "submit", str(SPEC), *SETTINGS, "--set", f"job.run_root={tmp_path}", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    run = RunDir(Path(told["run_dir"]))
    wait_for(
        lambda: any(event["kind"] == "driver_started" for event in events_of(run)),
        "driver",
        run,
        timeout_s=200,
    )
    cancelled = miles_hpc(slurm, "cancel", str(run.root), timeout_s=120)
    assert cancelled.returncode == 0, cancelled.stderr
    record = slurm.wait_for_job(told["job_id"])
    assert record["JobState"] in ("CANCELLED", "FAILED")
    wait_for(lambda: not processes_of(run), "end of all processes", run, timeout_s=10)
    assert verdict_of(run).state == "CANCELLED", outputs(run)
    state = json.loads(miles_hpc(slurm, "status", str(run.root), "--json").stdout)["state"]
    assert state == "CANCELLED"
    assert_nothing_left(run)


def test_a_job_longer_than_its_time_limit_saves_requeues_itself_and_goes_on(slurm, tmp_path):
    settings = (
        "cluster.memory_per_node=2GiB",
        f"job.run_root={tmp_path}",
        'job.time_limit="4min"',
        "job.max_attempts=1",
        'agent.save_before_limit="150s"',
        # More than any machine does in one attempt, and no checkpoint but the one that is asked for.
        "train.num_steps=100000",
        "checkpoint.save_interval=50000",
    )
    words = [word for setting in settings for word in ("--set", setting)]
    done = miles_hpc(slurm, "submit", str(SPEC), *words, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    run = RunDir(Path(told["run_dir"]))
    wait_for(run.attempt(1).verdict.exists, "end of the first attempt", run, timeout_s=300)
    verdict = verdict_of(run, 1)
    assert (verdict.state, verdict.driver_exit_code) == ("REQUEUED", 75), outputs(run)
    events = events_of(run)
    [stopped] = [event["step"] for event in events if event["kind"] == "stopped_on_request"]
    assert f"a further attempt continues from step-{stopped}" in verdict.reason
    assert stopped >= 1
    # The second attempt shall be the last, on a machine of any speed.
    plan = json.loads(run.plan.read_text())
    plan["spec"]["train"]["num_steps"] = stopped + 3
    write_whole(run.plan, json.dumps(plan))
    record = slurm.wait_for_job(told["job_id"], timeout_s=300)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), outputs(run)
    assert verdict_of(run, 2).state == "COMPLETED"
    events = events_of(run)
    loaded = [event["step"] for event in events if event["kind"] == "checkpoint_loaded"]
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert loaded == [stopped]
    assert steps == list(range(1, stopped + 4))
    assert_nothing_left(run)
