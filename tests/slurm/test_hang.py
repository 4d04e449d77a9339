"""A driver that hangs in an actor on another node: the stacks of all nodes are kept and the job ends like a failed one."""

import pytest

from tests.slurm.jobs import (
    assert_nothing_left,
    attempt_of,
    events_of,
    outputs,
    submit,
    verdict_of,
    write_run,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

HANGS = """
    import os, pathlib, time
    import ray
    from miles_hpc.run.events import EventLog, Kind

    @ray.remote(num_cpus=0, resources={"miles_hpc_node_1": 0.01})
    class Rank:
        def all_reduce_without_peers(self, fast):
            if not fast:
                time.sleep(600)

    def wait_for_ranks(rank, step):
        ray.get(rank.all_reduce_without_peers.remote(fast=step == 1))

    ray.init(logging_level="ERROR")
    log = EventLog(pathlib.Path(os.environ["MILES_HPC_EVENTS"]), os.environ["MILES_HPC_NODE"])
    rank = Rank.remote()
    for step in (1, 2):
        log.append(Kind.PHASE, phase="train", step=step)
        wait_for_ranks(rank, step)
        log.append(Kind.STEP, step=step)
"""


def test_a_hang_in_another_nodes_actor_leaves_the_stacks_of_all_nodes(slurm, tmp_path):
    run = write_run(tmp_path / "run", HANGS, num_nodes=2, hang_after_s=10.0)
    record = slurm.wait_for_job(submit(slurm, run), timeout_s=150)
    assert record["ExitCode"] == "12:0", outputs(run)
    verdict = verdict_of(run)
    assert (verdict.state, verdict.cause) == ("FAILED", "hang")
    assert "in phase train of step 2" in verdict.evidence
    head, worker = (attempt_of(run).stacks(node).read_text() for node in ("g1-n01", "g1-n02"))
    assert "in wait_for_ranks" in head
    assert "in all_reduce_without_peers" in worker
    for text in (head, worker):
        assert "raylet" in text
        assert "state and wait channel S " in text
    assert [event["step"] for event in events_of(run) if event["kind"] == "hang"] == [2]
    assert_nothing_left(run)
