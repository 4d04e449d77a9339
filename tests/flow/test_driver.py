"""The native engine's driver on a plain Ray of two nodes: a whole run, a resumed one, and the ways it fails."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_hpc.paths import RunDir, packaged
from miles_hpc.plan.layout import make_layout, make_rollout_layout
from miles_hpc.run.events import read_events
from miles_hpc.run.resume import Identity
from miles_hpc.run.save_request import DRIVER_EXIT_CODE, ask_to_save
from miles_hpc.spec.load import load_spec
from tests.flow.local_ray import LocalRay, local_ray

pytestmark = [pytest.mark.trainer, pytest.mark.slow, pytest.mark.timeout(300)]

DRIVER_DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    root = tmp_path_factory.mktemp("agents")
    # Unix sockets of Ray do not fit into pytest's long folders.
    temp = Path(f"/tmp/mh{os.getpid()}")
    nccl = Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2")
    with local_ray(
        root, root / "attempts" / "1", temp, extra={"MILES_HPC_NCCL": str(next(nccl))}
    ) as ray:
        yield ray


def make_run(root: Path, *overrides: str) -> RunDir:
    run = RunDir(root)
    root.mkdir()
    path = packaged("jobs") / "demo_tiny.toml"
    spec = load_spec(path, overrides=["checkpoint.save_hf=true", *overrides], local=True).spec
    plan = {
        "version": 1,
        "spec": json.loads(spec.model_dump_json()),
        "layout": dataclasses.asdict(make_layout(spec)),
        "rollout": dataclasses.asdict(make_rollout_layout(spec)),
    }
    run.plan.write_text(json.dumps(plan))
    return run


def start_driver(cluster: LocalRay, run: RunDir, attempt: int) -> subprocess.Popen[bytes]:
    folder = run.attempt(attempt)
    folder.root.mkdir(parents=True)
    identity = Identity(
        job_id="7", restart_count=attempt - 1, cluster="local", head_node="local0", started_s=0.0
    )
    folder.identity.write_text(json.dumps(dataclasses.asdict(identity)))
    environ = {
        **cluster.environ,
        "MILES_HPC_RUN_DIR": str(run.root),
        "MILES_HPC_ATTEMPT_DIR": str(folder.root),
        "MILES_HPC_EVENTS": str(folder.node_events("local0")),
    }
    with folder.driver_log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "miles_hpc.trainer", str(run.root)],
            env=environ,
            stdout=log,
            stderr=log,
            cwd="/",
        )


def events(run: RunDir, attempt: int, kind: str) -> list[dict]:
    path = run.attempt(attempt).node_events("local0")
    return [event for event in read_events(path) if event["kind"] == kind]


def drive(cluster: LocalRay, run: RunDir, attempt: int = 1) -> int:
    driver = start_driver(cluster, run, attempt)
    try:
        return driver.wait(timeout=DRIVER_DEADLINE_S)
    finally:
        driver.kill()
        driver.wait()


def wait_for_step(run: RunDir, driver: subprocess.Popen[bytes], step: int) -> None:
    ends = time.monotonic() + DRIVER_DEADLINE_S
    while time.monotonic() < ends:
        if any(event["step"] >= step for event in events(run, 1, "step")):
            return
        assert driver.poll() is None, run.attempt(1).driver_log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {DRIVER_DEADLINE_S} s")


@pytest.fixture(scope="module")
def finished(cluster, tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("finished") / "run")
    code = drive(cluster, run)
    assert code == 0, run.attempt(1).driver_log.read_text()
    return run


def test_a_run_takes_every_step_and_both_sides_agree_in_each(finished):
    steps = events(finished, 1, "step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(event["logprob_max_diff"] < 1e-5 for event in steps)
    assert all(event["num_samples"] == 32 for event in steps)
    # Zeros would mean that nothing was taught.
    assert any(event["grad_norm"] > 0 for event in steps)
    assert steps[-1]["time_left_s"] == 0.0


def test_streamed_optimizer_state_trains_the_same_and_resumes(cluster, finished, tmp_path):
    run = make_run(tmp_path / "run", "offload.stream_optimizer=true")
    assert drive(cluster, run) == 0, run.attempt(1).driver_log.read_text()
    (run.checkpoints / "step-4" / "COMPLETE").unlink()
    assert drive(cluster, run, attempt=2) == 0, run.attempt(2).driver_log.read_text()
    [loaded] = events(run, 2, "checkpoint_loaded")
    assert loaded["step"] == 2
    plain, whole, resumed = (
        events(finished, 1, "step"),
        events(run, 1, "step"),
        events(run, 2, "step"),
    )
    assert [event["step"] for event in resumed] == [3, 4]
    for left, right in [*zip(plain, whole, strict=True), *zip(whole[2:], resumed, strict=True)]:
        assert right["reward"] == left["reward"]
        assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=1e-3)
    saved = sorted(path.name for path in (run.checkpoints / "step-2").rglob("optimizer-rank*.bin"))
    assert saved == ["optimizer-rank00000.bin", "optimizer-rank00001.bin"]
    # Less moves: both moments of every adapter stay where they are.
    moved = [
        {event["bytes"] for event in events(each, 1, "offload") if event["step"] == 4}
        for each in (finished, run)
    ]
    assert max(moved[1]) < min(moved[0])
    assert not list(Path(cluster.environ["MILES_HPC_SCRATCH"]).rglob("optimizer.bin"))


def test_each_step_syncs_new_weights_into_both_engines(finished):
    syncs = events(finished, 1, "weight_sync")
    assert [event["version"] for event in syncs] == [0, 1, 2, 3, 4]
    assert all(event["num_engines"] == 2 for event in syncs)
    assert len({event["digest"] for event in syncs}) == 5


def test_the_trainer_really_leaves_for_disk_during_every_rollout(finished):
    moved = [e for e in events(finished, 1, "offload") if e["actor"].startswith("trainer")]
    back = [e for e in events(finished, 1, "onload") if e["actor"].startswith("trainer")]
    assert [e["step"] for e in moved] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [e["step"] for e in back] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert {e["node"] for e in moved} == {"local0", "local1"}
    assert all(e["bytes"] > 100_000 for e in [*moved, *back])


def test_every_trainer_rank_proves_the_pinned_nccl(cluster, finished):
    # The actors write to the events of the node they run on, which this cluster has for all its drivers.
    agents = RunDir(Path(cluster.environ["MILES_HPC_RUN_DIR"]))
    for node in ("local0", "local1"):
        proofs = [
            event
            for event in read_events(agents.attempt(1).node_events(node))
            if event["kind"] == "nccl_proof"
        ]
        assert {(p["node"], p["version_code"]) for p in proofs} == {(node, 23007)}
        assert {p["library"] for p in proofs} == {cluster.environ["MILES_HPC_NCCL"]}


def test_checkpoints_are_complete_and_the_adapter_loads_in_peft(finished):
    assert sorted(path.parent.name for path in finished.checkpoints.glob("*/COMPLETE")) == [
        "step-2",
        "step-4",
    ]
    # Loaded in a process of its own, since tests of flow/ import no model library.
    program = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from peft import PeftModel\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)\n"
        "ids = torch.tensor([[1, 40, 41, 42]])\n"
        "with torch.no_grad():\n"
        "    plain = base(ids).logits\n"
        "    tuned = PeftModel.from_pretrained(base, sys.argv[2])(ids).logits\n"
        "assert (plain - tuned).abs().max() > 1e-3\n"
    )
    [base] = finished.cache.glob("model-*")
    adapter = finished.checkpoints / "step-4" / "peft"
    subprocess.run(
        [sys.executable, "-c", program, str(base), str(adapter)], check=True, timeout=120
    )


def test_a_resumed_run_continues_as_if_it_had_not_stopped(cluster, finished):
    before = events(finished, 1, "step")[2:]
    (finished.checkpoints / "step-4" / "COMPLETE").unlink()
    assert drive(cluster, finished, attempt=2) == 0
    [loaded] = events(finished, 2, "checkpoint_loaded")
    assert loaded["step"] == 2
    after = events(finished, 2, "step")
    assert [event["step"] for event in after] == [3, 4]
    for old, new in zip(before, after, strict=True):
        assert new["reward"] == old["reward"]
        assert new["response_tokens"] == old["response_tokens"]
        assert new["grad_norm"] == pytest.approx(old["grad_norm"], rel=1e-3)
    assert (finished.checkpoints / "step-4" / "COMPLETE").is_file()


def test_a_finished_run_has_nothing_left_to_do(cluster, finished):
    assert drive(cluster, finished, attempt=3) == 0
    assert events(finished, 3, "step") == []


def actor_process(cluster: LocalRay, title: str) -> psutil.Process:
    """Return the process of an actor below this test's own Ray."""
    for pid in cluster.pids:
        for process in psutil.Process(pid).children(recursive=True):
            try:
                if title in " ".join(process.cmdline()):
                    return process
            except psutil.Error:
                # It ended while we looked.
                continue
    raise AssertionError(f"no {title} below {cluster.pids}")


def test_a_killed_trainer_rank_ends_the_run_and_is_named(cluster, tmp_path):
    run = make_run(tmp_path / "run", "train.num_steps=500")
    driver = start_driver(cluster, run, 1)
    try:
        wait_for_step(run, driver, 2)
        actor_process(cluster, "ray::TrainerHost").kill()
        assert driver.wait(timeout=60) == 12
    finally:
        driver.kill()
        driver.wait()
    last = run.attempt(1).driver_log.read_text().split("error: ")[-1]
    assert "trainer rank" in last
    assert "on node local" in last
    assert "its process died" in last
    assert "Traceback" not in last


def test_sigterm_ends_the_driver_quickly(cluster, tmp_path):
    run = make_run(tmp_path / "run", "train.num_steps=500")
    driver = start_driver(cluster, run, 1)
    try:
        wait_for_step(run, driver, 1)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=30) == 143
    finally:
        driver.kill()
        driver.wait()


def wait_for_rollout(run: RunDir, driver: subprocess.Popen[bytes], step: int) -> None:
    ends = time.monotonic() + DRIVER_DEADLINE_S
    while ("rollout", step) not in [(e["phase"], e["step"]) for e in events(run, 1, "phase")]:
        assert driver.poll() is None, run.attempt(1).driver_log.read_text()
        assert time.monotonic() < ends, f"no rollout of step {step}"
        time.sleep(0.05)


def ask(run: RunDir, attempt: int) -> None:
    ask_to_save(run.attempt(attempt), f"7-{attempt - 1}", "cancel", "asked by a test")


def test_a_driver_that_is_asked_saves_the_step_it_has_and_the_next_continues(cluster, tmp_path):
    # Long samples, so that the request comes in the middle of a rollout.
    settings = (
        "train.num_steps=50",
        "checkpoint.save_interval=40",
        "rollout.max_response_tokens=300",
    )
    run = make_run(tmp_path / "run", *settings)
    driver = start_driver(cluster, run, 1)
    try:
        wait_for_step(run, driver, 1)
        wait_for_rollout(run, driver, 2)
        ask(run, 1)
        assert driver.wait(timeout=DRIVER_DEADLINE_S) == DRIVER_EXIT_CODE
    finally:
        driver.kill()
        driver.wait()
    log = run.attempt(1).driver_log.read_text()
    [stopped] = events(run, 1, "stopped_on_request")
    assert (stopped["step"], stopped["saved"]) == (1, True), log
    assert [event["step"] for event in events(run, 1, "step")] == [1]
    phases = [(event["phase"], event["step"]) for event in events(run, 1, "phase")]
    assert phases[-2:] == [("rollout", 2), ("save", 1)]
    assert [entry.name for entry in run.checkpoints.iterdir()] == ["step-1"]
    half = run.checkpoints / "step-49"
    half.mkdir()
    (half / "rank.pt").touch()
    driver = start_driver(cluster, run, 2)
    try:
        ask(run, 2)
        assert driver.wait(timeout=DRIVER_DEADLINE_S) == DRIVER_EXIT_CODE
    finally:
        driver.kill()
        driver.wait()
    # Asked before its first step, it has nothing new to save.
    [again] = events(run, 2, "stopped_on_request")
    assert (again["step"], again["saved"]) == (1, False)
    assert events(run, 2, "step") == []
    assert events(run, 2, "checkpoint_loaded")[0]["step"] == 1
    assert not half.exists()


def test_an_order_of_phases_that_the_report_can_hold_against_the_plan(finished):
    phases = [(event["phase"], event["step"]) for event in events(finished, 1, "phase")]
    start = phases.index(("rollout", 2))
    assert phases[start : start + 6] == [
        ("rollout", 2), ("handoff", 2), ("train", 2), ("save", 2), ("handoff", 2), ("weight_sync", 2),
    ]  # fmt: skip


def test_a_cluster_too_small_for_the_bundles_is_refused_with_the_arithmetic(cluster, tmp_path):
    overrides = ("cluster.cpus_per_node=4", "engine.native.threads_per_rank=4")
    run = make_run(tmp_path / "run", *overrides)
    assert drive(cluster, run) == 12
    text = run.attempt(1).driver_log.read_text()
    assert "needs 1 bundles * 4 CPU = 4 CPU, but has 1" in text
    assert not run.cache.exists()
