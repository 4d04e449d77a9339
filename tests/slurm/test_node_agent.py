"""The node command on a real Slurm of several nodes, with a stub driver: it comes up, runs, and leaves nothing behind."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.slurm.jobs import (
    COMMA_VALUE,
    assert_nothing_left,
    attempt_of,
    events_of,
    outputs,
    processes_of,
    read_json,
    submit,
    verdict_of,
    wait_for,
    write_run,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

CANARY = "canary-7f3d-never-in-a-file"

LOOK_AROUND = """
    import json, os, pathlib, sys
    import ray
    ray.init(logging_level="ERROR")

    @ray.remote(num_cpus=0)
    class Look:
        def see(self):
            from miles_hpc.probe.nccl_hook import prove_nccl
            proof = prove_nccl()
            names = ("MILES_HPC_NODE", "MILES_HPC_NODE_INDEX", "MILES_HPC_EVENTS", "MILES_HPC_SCRATCH",
                     "PYTORCH_CUDA_ALLOC_CONF", "LD_PRELOAD", "TMPDIR", "RAY_ADDRESS")
            return {"code": proof.version_code, "mapped": list(proof.mapped), **{n: os.environ.get(n) for n in names}}

    preload = {"env_vars": {"LD_PRELOAD": os.environ["MILES_HPC_NCCL"]}}
    with_nccl = [Look.options(resources={f"miles_hpc_node_{i}": 0.01}, runtime_env=preload).remote() for i in range(4)]
    without = Look.options(resources={"miles_hpc_node_3": 0.01}).remote()
    token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text().strip()
    exposed = []
    for entry in pathlib.Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                exposed += [str(entry / name)] if token.encode() in (entry / name).read_bytes() else []
            except OSError:
                pass
    seen = {
        "actors": ray.get([look.see.remote() for look in with_nccl]),
        "plain": ray.get(without.see.remote()),
        "cpus": ray.cluster_resources()["CPU"],
        "memory": [node["Resources"]["memory"] for node in ray.nodes()],
        "stores": [node["Resources"]["object_store_memory"] for node in ray.nodes()],
        "nodes": len([node for node in ray.nodes() if node["Alive"]]),
        "token_mode": oct(os.stat(os.environ["RAY_AUTH_TOKEN_PATH"]).st_mode & 0o777),
        "exposed": exposed,
        "address": os.environ["RAY_ADDRESS"],
    }
    pathlib.Path(sys.argv[1], "seen.json").write_text(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def four_nodes(slurm, tmp_path_factory):
    """Return a finished run of four nodes, and Slurm's record of its job."""
    run = write_run(
        tmp_path_factory.mktemp("four") / "run with blank",
        LOOK_AROUND,
        num_nodes=4,
        memory_bytes=500 << 20,
    )
    # A foreign Ray of the user's shell, and a secret that must stay in the environment.
    job_id = submit(
        slurm,
        run,
        RAY_ADDRESS="203.0.113.9:6379",
        RAY_AUTH_TOKEN="of-another-ray",
        WANDB_API_KEY=CANARY,
    )
    record = slurm.wait_for_job(job_id)
    assert record["JobState"] == "COMPLETED", outputs(run)
    return run, read_json(attempt_of(run).root / "seen.json")


def test_four_nodes_form_one_ray_with_what_the_handoff_says(four_nodes):
    _, seen = four_nodes
    assert seen["nodes"] == 4
    assert seen["cpus"] == 8.0
    # Slurm gives 500 MiB, and nothing on this rig enforces it.
    assert seen["stores"] == [80 << 20] * 4
    assert seen["memory"] == [420 << 20] * 4
    assert [actor["MILES_HPC_NODE"] for actor in seen["actors"]] == [
        "g1-n01", "g1-n02", "g1-n03", "g1-n04",
    ]  # fmt: skip
    assert [actor["MILES_HPC_NODE_INDEX"] for actor in seen["actors"]] == ["0", "1", "2", "3"]
    assert len({actor["MILES_HPC_SCRATCH"] for actor in seen["actors"]}) == 4
    assert len({actor["TMPDIR"] for actor in seen["actors"]}) == 4


def test_a_value_with_commas_arrives_whole_in_a_worker(four_nodes):
    _, seen = four_nodes
    assert {actor["PYTORCH_CUDA_ALLOC_CONF"] for actor in seen["actors"]} == {COMMA_VALUE}


def test_only_the_actors_that_ask_for_it_get_the_pinned_nccl(four_nodes):
    _, seen = four_nodes
    assert [actor["code"] for actor in seen["actors"]] == [23007] * 4
    assert seen["plain"]["code"] is None
    assert seen["plain"]["mapped"] == []


def test_the_verdict_and_the_events_tell_the_whole_story(four_nodes):
    run, _ = four_nodes
    verdict = verdict_of(run)
    assert (verdict.state, verdict.exit_code, verdict.driver_exit_code) == ("COMPLETED", 0, 0)
    events = events_of(run)
    kinds = [event["kind"] for event in events]
    assert kinds.count("preflight") == kinds.count("nccl") == kinds.count("ray_started") == 4
    assert kinds.count("node_joined") == kinds.count("teardown") == 4
    assert [
        kinds.index(kind) for kind in ("attempt_started", "cluster_ready", "driver_started")
    ] == sorted(
        kinds.index(kind) for kind in ("attempt_started", "cluster_ready", "driver_started")
    )
    assert kinds[-1] == "attempt_ended"
    in_files = [path.read_text().splitlines() for path in attempt_of(run).root.glob("events-*")]
    assert sum(map(len, in_files)) == len(events)
    resolved = read_json(attempt_of(run).resolved)
    assert resolved["nodes"] == ["g1-n01", "g1-n02", "g1-n03", "g1-n04"]
    assert resolved["nccl"]["version_code"] == 23007
    assert len(resolved["nccl"]["sha256"]) == 64


def test_a_foreign_ray_is_not_joined(four_nodes):
    _, seen = four_nodes
    assert "203.0.113.9" not in seen["address"]


def test_the_token_and_the_users_secrets_are_in_no_file_and_on_no_command_line(four_nodes):
    run, seen = four_nodes
    assert seen["token_mode"] == "0o600"
    assert seen["exposed"] == []
    holders = [
        path
        for path in run.root.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert holders == []


def test_no_process_file_or_socket_is_left(four_nodes):
    run, _ = four_nodes
    assert_nothing_left(run)
    copied = {path.name for path in attempt_of(run).ray_logs("g1-n03").rglob("*")}
    assert "raylet.out" in copied


def test_a_failing_driver_ends_the_job_with_12_and_its_own_code_is_kept(slurm, tmp_path):
    run = write_run(
        tmp_path / "run",
        "import sys; print('the disk is on fire', file=sys.stderr); sys.exit(7)",
        num_nodes=2,
    )
    record = slurm.wait_for_job(submit(slurm, run))
    assert (record["JobState"], record["ExitCode"]) == ("FAILED", "12:0"), outputs(run)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.exit_code, verdict.driver_exit_code) == ("FAILED", 12, 7)
    assert "exit code 7" in verdict.reason
    assert "the disk is on fire" in verdict.reason
    assert str(attempt_of(run).driver_log) in verdict.reason
    assert_nothing_left(run)


STUBBORN = """
    import os, pathlib, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            # Neither a parent of ours nor our environment: only descent can find it.
            os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]], {})
        os._exit(0)
    pathlib.Path(sys.argv[1], "running").touch()
    time.sleep(600)
"""


def test_cancel_ends_a_driver_that_ignores_it_and_its_hidden_child(slurm, tmp_path):
    run = write_run(tmp_path / "run", STUBBORN, num_nodes=2, stop_grace_s=2.0)
    job_id = submit(slurm, run)
    wait_for(lambda: (run.attempt(1).root / "running").exists(), "running driver", run)
    slurm.run("scancel", job_id)
    record = slurm.wait_for_job(job_id)
    wait_for(lambda: not processes_of(run), "end of all processes", run, timeout_s=15)
    assert record["JobState"] == "CANCELLED"
    verdict = verdict_of(run)
    assert verdict.state == "CANCELLED", outputs(run)
    assert verdict.driver_exit_code == -signal.SIGKILL
    assert "SIGTERM" in verdict.reason
    assert_nothing_left(run)


LONG = """
    import pathlib, sys, time
    import ray
    ray.init(logging_level="ERROR")

    @ray.remote(num_cpus=0, resources={"miles_hpc_node_1": 0.01})
    def far():
        time.sleep(600)

    task = far.remote()
    pathlib.Path(sys.argv[1], "running").touch()
    ray.get(task)
"""


def victim(run, node: str, marker: bytes) -> int:
    """Return the pid of a process of `node` in this run, by what its environment and command say."""
    for pid in processes_of(run):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if marker in command and f"MILES_HPC_NODE={node}".encode() in environ:
            return pid
    raise AssertionError(f"no {marker!r} of {node}: {processes_of(run)}")


def test_a_killed_raylet_ends_the_job_and_names_its_node(slurm, tmp_path):
    run = write_run(tmp_path / "run", LONG, num_nodes=2)
    job_id = submit(slurm, run)
    wait_for(lambda: (run.attempt(1).root / "running").exists(), "running driver", run)
    os.kill(victim(run, "g1-n02", b"raylet/raylet"), signal.SIGKILL)
    record = slurm.wait_for_job(job_id)
    assert record["ExitCode"] == "11:0", outputs(run)
    verdict = verdict_of(run)
    assert verdict.state == "FAILED"
    assert "g1-n02" in verdict.reason
    assert_nothing_left(run)


def agent_pids(run, node: str) -> tuple[int, int]:
    """Return guard and agent of a node: the processes whose command is the node command, parent first."""
    found = []
    for pid, command in processes_of(run).items():
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if command.rstrip().endswith(f"-m miles_hpc.node {run.root}") and (
            f"SLURMD_NODENAME={node}".encode() in environ
        ):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            found.append((pid, parent))
    pids = {pid for pid, _ in found}
    (agent,) = [pid for pid, parent in found if parent in pids]
    (guard,) = pids - {agent}
    return guard, agent


@pytest.mark.parametrize(("node", "which"), [("g1-n02", 1), ("g1-n01", 1), ("g1-n02", 0)])
def test_a_killed_agent_or_guard_leaves_nothing_and_is_named(slurm, tmp_path, node, which):
    run = write_run(tmp_path / "run", LONG, num_nodes=2)
    job_id = submit(slurm, run)
    wait_for(lambda: (run.attempt(1).root / "running").exists(), "running driver", run)
    os.kill(agent_pids(run, node)[which], signal.SIGKILL)
    record = slurm.wait_for_job(job_id, timeout_s=60)
    assert record["JobState"] == "FAILED", outputs(run)
    verdict = verdict_of(run)
    assert node in verdict.reason
    assert_nothing_left(run)


def test_two_jobs_on_the_same_nodes_do_not_meet(slurm, tmp_path):
    source = """
        import json, os, pathlib, sys
        import ray
        ray.init(logging_level="ERROR")
        mine = {"nodes": len(ray.nodes()), "address": os.environ["RAY_ADDRESS"]}
        pathlib.Path(sys.argv[1], "seen.json").write_text(json.dumps(mine))
    """
    runs = [write_run(tmp_path / name, source, num_nodes=2) for name in ("one", "two")]
    jobs = [submit(slurm, run) for run in runs]
    for run, job_id in zip(runs, jobs, strict=True):
        assert slurm.wait_for_job(job_id)["JobState"] == "COMPLETED", outputs(run)
        assert_nothing_left(run)
    seen = [read_json(attempt_of(run).root / "seen.json") for run in runs]
    assert [entry["nodes"] for entry in seen] == [2, 2]
    assert seen[0]["address"] != seen[1]["address"]


def test_the_page_cache_of_the_checkpoint_goes_once_the_driver_has_loaded(slurm, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(os.urandom(4 << 20))
    with (checkpoint / "weights").open("rb+") as file:
        os.fsync(file.fileno())
    source = f"""
        import json, os, pathlib, time
        pathlib.Path({str(checkpoint / "weights")!r}).read_bytes()
        from miles_hpc.run.events import EventLog, Kind
        log = EventLog(pathlib.Path(os.environ["MILES_HPC_EVENTS"]), os.environ["MILES_HPC_NODE"])
        log.append(Kind.MODEL_LOADED, seconds=0.1)
        attempt = pathlib.Path(os.environ["MILES_HPC_ATTEMPT_DIR"])
        end = time.monotonic() + 30
        while time.monotonic() < end:
            texts = [path.read_text() for path in attempt.glob("events-*")]
            if sum("page_cache_dropped" in text for text in texts) == 2:
                break
            time.sleep(0.05)
    """
    run = write_run(tmp_path / "run", source, num_nodes=2, page_cache_roots=(str(checkpoint),))
    assert slurm.wait_for_job(submit(slurm, run))["JobState"] == "COMPLETED", outputs(run)
    drops = [event for event in events_of(run) if event["kind"] == "page_cache_dropped"]
    assert sorted(event["node"] for event in drops) == ["g1-n01", "g1-n02"]
    assert all(event["total_bytes"] == 4 << 20 for event in drops)
    assert max(event["resident_before_bytes"] for event in drops) > 0
    assert all(event["resident_after_bytes"] == 0 for event in drops), json.dumps(drops)
