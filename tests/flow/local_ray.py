"""A Ray cluster of several nodes on this machine, as node agents would leave it: for tests of the driver alone.

Every node is one `ray start --block` process that we own, with its own temp dir, ports and agent variables.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.probe.nccl_hook import PYTHON_START

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRay:
    """A running cluster; `environ` is what the driver on the head node gets."""

    address: str
    environ: Mapping[str, str]
    pids: tuple[int, ...]


def agent_environ(
    run_dir: Path, attempt_dir: Path, index: int, address: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of docs/design.md for node `index`."""
    scratch = run_dir / "scratch" / f"node{index}"
    scratch.mkdir(parents=True, exist_ok=True)
    attempt_dir.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[2]
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MILES_HPC_"))},
        "PYTHONPATH": f"{PYTHON_START}:{root}",
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "disabled",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MILES_HPC_RUN_DIR": str(run_dir),
        "MILES_HPC_ATTEMPT_DIR": str(attempt_dir),
        "MILES_HPC_NODE": f"local{index}",
        "MILES_HPC_NODE_INDEX": str(index),
        "MILES_HPC_EVENTS": str(attempt_dir / f"events-local{index}.jsonl"),
        "MILES_HPC_SCRATCH": str(scratch),
        "MILES_HPC_JOB_TAG": f"test-{os.getpid()}",
        **extra,
    }


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_node(
    index: int, address: str, temp_dir: Path, environ: Mapping[str, str], log: Path, num_cpus: int
) -> subprocess.Popen[bytes]:
    """Start one node's Ray in a session of its own, so that it can be ended as a group."""
    port = address.rpartition(":")[2]
    head = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor"]
    where = head if index == 0 else [f"--address={address}"]
    argv = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        *where,
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--num-cpus={num_cpus}",
        "--num-gpus=0",
        f"--object-store-memory={100 * 2**20}",
        "--disable-usage-stats",
        "--dashboard-agent-listen-port=0",
        f"--temp-dir={temp_dir / str(index)}",
        "--resources=" + json.dumps({f"miles_hpc_node_{index}": 1}),
    ]
    with log.open("ab") as stream:
        return subprocess.Popen(
            argv, env=dict(environ), stdout=stream, stderr=stream, start_new_session=True
        )


@contextmanager
def local_ray(
    run_dir: Path,
    attempt_dir: Path,
    temp_dir: Path,
    *,
    num_nodes: int = 2,
    num_cpus: int = 1,
    extra: Mapping[str, str] | None = None,
) -> Iterator[LocalRay]:
    """Run `num_nodes` nodes until the block ends; `temp_dir` must be short, for unix sockets."""
    address = f"127.0.0.1:{free_port()}"
    nodes: list[subprocess.Popen[bytes]] = []
    environs = [
        agent_environ(run_dir, attempt_dir, index, address, extra or {})
        for index in range(num_nodes)
    ]
    try:
        for index, environ in enumerate(environs):
            log = attempt_dir / f"local{index}.log"
            nodes.append(start_node(index, address, temp_dir, environ, log, num_cpus))
            if index == 0:
                _wait_for_port(address, nodes[0])
        _wait_for_nodes(address, environs[0], num_nodes)
        yield LocalRay(address=address, environ=environs[0], pids=tuple(node.pid for node in nodes))
    finally:
        for node in reversed(nodes):
            node.terminate()
        ends = time.monotonic() + STOP_DEADLINE_S
        for node in nodes:
            try:
                node.wait(timeout=max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, 9)
                node.wait(timeout=5)


def _wait_for_port(address: str, process: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    ends = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < ends:
        assert process.poll() is None, f"ray start ended with {process.returncode}"
        with socket.socket() as client:
            client.settimeout(0.1)
            if client.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"no Ray head at {address} within {START_DEADLINE_S} s")


def _wait_for_nodes(address: str, environ: Mapping[str, str], num_nodes: int) -> None:
    """Ask the GCS from a child process, since a process can connect to one Ray only."""
    code = (
        "import sys, time\n"
        "from ray._raylet import GcsClient\n"
        "client = GcsClient(address=sys.argv[1])\n"
        "ends = time.monotonic() + float(sys.argv[3])\n"
        "count = lambda: sum(info.state == 0 for info in client.get_all_node_info().values())\n"
        "while count() < int(sys.argv[2]):\n"
        "    assert time.monotonic() < ends, f'{count()} of {sys.argv[2]} nodes'\n"
        "    time.sleep(0.05)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, address, str(num_nodes), str(START_DEADLINE_S)],
        env=dict(environ),
        check=True,
        timeout=START_DEADLINE_S + 30,
    )
