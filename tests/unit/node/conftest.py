"""A node's context in a temporary run folder."""

import os
import sys
from dataclasses import replace

import pytest

from miles_hpc.handoff import Handoff, NcclPin, ScratchRequest, Variable
from miles_hpc.node.context import NodeContext
from miles_hpc.node.host_memory import MemoryCgroup
from miles_hpc.node.memory import memory_cgroups
from miles_hpc.node.rendezvous import Rendezvous
from miles_hpc.node.supervise import StopRequest
from miles_hpc.paths import RunDir
from miles_hpc.run.events import EventLog
from miles_hpc.slurm import NodeIdentity
from tests.fakes.slurm import fake_slurm, no_slurm  # noqa: F401


@pytest.fixture
def small_cgroup():
    """A real memory cgroup of 64 MiB below this process's own."""
    own = next(memory_cgroups(), None)
    if own is None:
        pytest.skip("no memory cgroup on this machine")
    folder, version = own[0] / f"mhpc-test-{os.getpid()}", own[1]
    try:
        folder.mkdir()
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (folder / limit).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield MemoryCgroup(folder=folder, version=version)
    folder.rmdir()


@pytest.fixture
def make_context(tmp_path):
    """Return a function that makes the context of one node of three; keywords replace fields of the handoff."""

    def make(node_index: int = 0, **changes) -> NodeContext:
        handoff = Handoff(
            run_dir=str(tmp_path),
            code_dir="/frozen",
            python=sys.executable,
            cluster="slurm",
            num_nodes=3,
            ranks_per_node=1,
            gpus_per_node=0,
            cpus_per_node=4,
            memory_bytes=None,
            object_store_bytes=80 << 20,
            environment=(Variable(name="A", value="1,2"),),
            nccl=NcclPin(path=None, version_code=23007, preload=True),
            scratch=ScratchRequest(root=None, min_free_bytes=0, allow_memory=False),
            interface=None,
            driver_argv=("driver", "{attempt_dir}"),
            page_cache_roots=(),
            resume="auto",
            max_attempts=1,
            ready_deadline_s=5.0,
            stop_grace_s=1.0,
        )
        nodes = ("n1", "n2", "n3")
        run = RunDir(tmp_path)
        attempt = run.attempt(1)
        attempt.root.mkdir(parents=True, exist_ok=True)
        return NodeContext(
            run=run,
            handoff=replace(handoff, **changes),
            identity=NodeIdentity(
                cluster="slurm",
                job_id="7",
                restart_count=0,
                node=nodes[node_index],
                node_index=node_index,
                nodes=nodes,
            ),
            attempt=attempt,
            rendezvous=Rendezvous(attempt.rendezvous, "7-0"),
            events=EventLog(attempt.node_events(nodes[node_index]), nodes[node_index]),
            stop=StopRequest(),
        )

    return make
