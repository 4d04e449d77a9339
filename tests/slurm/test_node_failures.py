"""Nodes that are not fit, never come or are told to stop: the job ends soon, with the right code and the node's name."""

import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miles_hpc.handoff import NcclPin, ScratchRequest, node_argv
from tests.slurm.jobs import (
    assert_nothing_left,
    attempt_of,
    events_of,
    handoff_of,
    outputs,
    processes_of,
    submit,
    verdict_of,
    wait_for,
    write_run,
    write_variant,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

NEVER = "raise SystemExit('this driver must not start')"


def command_of(run) -> str:
    return " ".join(node_argv(handoff_of(run)))


def test_bad_scratch_on_one_node_ends_the_job_with_10_and_names_node_and_path(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=3)
    # A link hides a memory file system; only the resolved path tells.
    (tmp_path / "nvme").symlink_to("/dev/shm")
    bad = ScratchRequest(root=str(tmp_path / "nvme"), min_free_bytes=1 << 20, allow_memory=False)
    variant = write_variant(run, tmp_path / "variant", scratch=bad)
    job_id = submit(
        slurm,
        run,
        on_node={"g1-n02": command_of(variant).replace(str(run.root), str(variant.root))},
    )
    record = slurm.wait_for_job(job_id)
    assert record["ExitCode"] == "10:0", outputs(run)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.driver_exit_code) == ("FAILED", None)
    assert "g1-n02: scratch" in verdict.reason
    assert "tmpfs" in verdict.reason
    assert "g1-n01: scratch" not in verdict.reason
    assert verdict.cause == "preflight"
    assert "g1-n02: scratch" in verdict.evidence
    wait_for(lambda: not processes_of(run), "end of all processes", run, timeout_s=10)


def spoiled_nccl(kind: str, folder: Path) -> str:
    """Return the path of a library that is missing, no library, or of another machine."""
    path = folder / "libnccl.so.2"
    if kind == "text":
        path.write_text("not a library")
    if kind == "other machine":
        shutil.copyfile(Path(sys.executable).resolve(), path)
        with path.open("r+b") as file:
            # e_machine of the ELF header: 0xB7 is aarch64, 0xF7 bpf; neither host can load the second.
            file.seek(18)
            file.write(b"\xf7\x00")
    return str(path)


@pytest.mark.parametrize("kind", ["missing", "text", "other machine"])
def test_an_nccl_that_does_not_open_is_an_error_and_no_warning(slurm, tmp_path, kind):
    pin = NcclPin(path=spoiled_nccl(kind, tmp_path), version_code=23007, preload=True)
    run = write_run(tmp_path / "run", NEVER, num_nodes=2, nccl=pin)
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "10:0", outputs(run)
    reason = verdict_of(run).reason
    assert "NCCL" in reason
    assert pin.path in reason
    assert "23007 (2.30.7)" in reason
    assert not (attempt_of(run).driver_log).exists()


def test_the_wrong_nccl_version_is_named_with_both_versions(slurm, tmp_path):
    pin = NcclPin(path=None, version_code=22809, preload=True)
    run = write_run(tmp_path / "run", NEVER, num_nodes=1, nccl=pin)
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "10:0", outputs(run)
    assert "23007 (2.30.7)" in verdict_of(run).reason
    assert "22809 (2.28.9)" in verdict_of(run).reason


def test_a_ray_that_cannot_be_imported_is_the_nodes_fault(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=2)
    # The code folder comes before the installed packages: a spoiled Ray there is found first.
    code = tmp_path / "code"
    (code / "ray").mkdir(parents=True)
    (code / "miles_hpc").symlink_to(Path(handoff_of(run).code_dir) / "miles_hpc")
    (code / "ray" / "__init__.py").write_text("raise ImportError('a library of Ray is missing')")
    run.handoff.write_text(replace(handoff_of(run), code_dir=str(code)).to_json())
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "10:0", outputs(run)
    assert "a library of Ray is missing" in verdict_of(run).reason
    assert ": Ray: found" in verdict_of(run).reason


def test_all_faults_of_a_node_are_reported_at_once(slurm, tmp_path):
    run = write_run(
        tmp_path / "run",
        NEVER,
        num_nodes=1,
        nccl=NcclPin(path=str(tmp_path / "none.so"), version_code=23007, preload=True),
        scratch=ScratchRequest(root="/dev/shm", min_free_bytes=1 << 60, allow_memory=False),
        memory_bytes=1 << 60,
        gpus_per_node=8,
    )
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "10:0", outputs(run)
    reason = verdict_of(run).reason
    assert [
        word for word in ("NCCL", "scratch", "memory", "GPUs") if f"g1-n01: {word}" not in reason
    ] == []


def test_a_node_that_never_comes_is_named_at_the_deadline(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=2, ready_deadline_s=15.0)
    job_id = submit(slurm, run, on_node={"g1-n02": "sleep 60"})
    wait_for(lambda: run.attempt(1).verdict.exists(), "verdict", run, timeout_s=90)
    verdict = verdict_of(run)
    slurm.run("scancel", job_id)
    slurm.wait_for_job(job_id)
    assert verdict.exit_code == 11, outputs(run)
    assert "g1-n02 (not in Ray)" in verdict.reason
    assert "1 of 2 nodes" in verdict.reason
    assert verdict.cause == "ray_bring_up"
    assert_nothing_left(run)


def test_an_allocation_of_another_size_is_refused(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=2)
    text = run.handoff.read_text()
    job_id = submit(slurm, run)
    run.handoff.write_text(text.replace('"num_nodes": 2', '"num_nodes": 3'))
    record = slurm.wait_for_job(job_id)
    assert record["ExitCode"] == "10:0", outputs(run)
    assert "2 nodes" in outputs(run)
    assert "expected 3" in outputs(run)


def test_a_driver_that_ends_by_a_signal_is_told_apart(slurm, tmp_path):
    source = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    run = write_run(tmp_path / "run", source, num_nodes=1)
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "12:0", outputs(run)
    assert verdict_of(run).driver_exit_code == -signal.SIGSEGV
    assert f"signal {int(signal.SIGSEGV)}" in verdict_of(run).reason
    assert verdict_of(run).cause == "unknown"
    assert "ended by signal 11" in verdict_of(run).evidence


def test_an_exception_of_the_driver_is_the_evidence(slurm, tmp_path):
    run = write_run(tmp_path / "run", "{}['reward']", num_nodes=1)
    slurm.wait_for_job(submit(slurm, run))
    verdict = verdict_of(run)
    assert (verdict.cause, verdict.evidence) == ("user_code", "driver.log: KeyError: 'reward'")


def test_a_plain_scancel_is_told_from_a_preemption(slurm, tmp_path):
    source = """
        import pathlib, sys, time
        (pathlib.Path(sys.argv[1]) / "running").touch()
        time.sleep(600)
    """
    run = write_run(tmp_path / "run", source, num_nodes=1)
    job_id = submit(slurm, run)
    wait_for(lambda: (run.attempt(1).root / "running").exists(), "running driver", run)
    assert slurm.run("scancel", job_id).returncode == 0
    slurm.wait_for_job(job_id)
    assert (verdict_of(run).state, verdict_of(run).cause) == ("CANCELLED", "cancelled")


def test_what_a_failed_driver_left_writing_gets_its_grace(slurm, tmp_path):
    source = """
        import os, pathlib, sys, time
        if os.fork() == 0:
            time.sleep(3)
            pathlib.Path(sys.argv[1], "checkpoint").write_text("whole")
            os._exit(0)
        sys.exit(1)
    """
    run = write_run(tmp_path / "run", source, num_nodes=1, stop_grace_s=15.0)
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "12:0", outputs(run)
    assert (attempt_of(run).root / "checkpoint").read_text() == "whole"
    assert_nothing_left(run)


def test_a_requeued_job_makes_a_second_attempt_and_keeps_the_first(slurm, tmp_path):
    source = """
        import os, pathlib, sys, time
        attempt = pathlib.Path(sys.argv[1])
        print("output of attempt", attempt.name, flush=True)
        (attempt / "running").touch()
        if attempt.name == "1":
            time.sleep(600)
    """
    run = write_run(tmp_path / "run", source, num_nodes=2)
    job_id = submit(slurm, run)
    wait_for(lambda: (run.attempt(1).root / "running").exists(), "running driver", run)
    assert slurm.run("scontrol", "requeue", job_id).returncode == 0
    wait_for(
        lambda: (run.attempt(2).root / "running").exists(), "second attempt", run, timeout_s=90
    )
    record = slurm.wait_for_job(job_id)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "1"), outputs(run)
    logs = [attempt_of(run, number).driver_log.read_text() for number in (1, 2)]
    assert logs == ["output of attempt 1\n", "output of attempt 2\n"]
    assert (verdict_of(run, 1).state, verdict_of(run, 1).cause) == ("CANCELLED", "preemption")
    assert "Restarts=1" in verdict_of(run, 1).evidence
    assert (verdict_of(run, 2).state, verdict_of(run, 2).cause) == ("COMPLETED", "none")
    started = [event["attempt"] for event in events_of(run) if event["kind"] == "attempt_started"]
    assert started == [1, 2]
    assert_nothing_left(run)


@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace needs root")
def test_a_node_that_shares_no_network_with_the_head_ends_the_job_before_ray_waits(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=2)
    alone = f"unshare --net sh -c 'ip link set lo up && exec \"$@\"' sh {command_of(run)}"
    record = slurm.wait_for_job(submit(slurm, run, on_node={"g1-n02": alone}))
    assert record["ExitCode"] == "10:0", outputs(run)
    reason = verdict_of(run).reason
    assert reason.startswith("g1-n02: network: found"), reason
    assert "lo 127.0.0.1" in reason
    assert "g1-n01 on another host" in reason


@pytest.mark.skipif(os.getuid() != 0, reason="a network namespace needs root")
def test_a_head_that_does_not_answer_is_told_with_both_addresses(slurm, tmp_path):
    """The node has a network of the same addresses as the head's, which leads to nobody."""
    driver = "raise SystemExit('this driver must not start')"
    run = write_run(tmp_path / "run", driver, num_nodes=2, interface="10.77.0.0/24")
    here = "ip link add v0 type veth peer name v1 && ip addr add 10.77.0.{}/24 dev v0 && ip link set v0 up && ip link set v1 up"
    commands = {
        node: f"unshare --net sh -c '{here.format(number)} && ip link set lo up && exec \"$@\"' sh {command_of(run)}"
        for number, node in enumerate(slurm.nodes[:2], start=1)
    }
    record = slurm.wait_for_job(submit(slurm, run, on_node=commands), timeout_s=180)
    assert record["ExitCode"] == "10:0", outputs(run)
    reason = verdict_of(run).reason
    assert reason.startswith("g1-n02: network: found no answer from g1-n01 at 10.77.0.1:"), reason
    assert "asked from 10.77.0.2" in reason


def test_a_subnet_chooses_the_interface_of_every_node_and_nccl_gets_its_name(slurm, tmp_path):
    driver = """
        import os
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        print("seen", *(os.environ[name] for name in names), os.environ["RAY_ADDRESS"].partition(":")[0], flush=True)
    """
    run = write_run(tmp_path / "run", driver, num_nodes=2, interface="127.0.0.0/8")
    record = slurm.wait_for_job(submit(slurm, run))
    assert record["ExitCode"] == "0:0", outputs(run)
    assert "seen lo =lo 127.0.0.1" in attempt_of(run).driver_log.read_text()
