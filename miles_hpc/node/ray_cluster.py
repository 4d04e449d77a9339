"""The job's own Ray: start the head or join it, and tell when every node of the job is in.

Ray chooses its ports itself (the head's with --port=0, read back from its session), so jobs and nodes that share a host do
not collide. Another Ray on the host is neither joined nor stopped. Knows no driver.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.errors import Fault, MilesHpcError, NodeError, PreflightError
from miles_hpc.handoff import Handoff
from miles_hpc.node.context import NodeContext
from miles_hpc.node.network import Interface, free_port, is_reachable
from miles_hpc.node.ray_memory import RayMemory
from miles_hpc.node.rendezvous import HeadAddress, NodeFailure
from miles_hpc.node.supervise import Child, LineReader, start_child, start_reporter, wait_for
from miles_hpc.process import run_short
from miles_hpc.run.events import Kind
from miles_hpc.slurm import NodeIdentity

NODE_RESOURCE = "miles_hpc_node_"
_IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """What this node's Ray is started with."""

    environ: Mapping[str, str]
    interface: Interface
    temp: Path
    memory: RayMemory
    client_server: bool
    dashboard_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What Ray says of one node of the job."""

    index: int
    alive: bool
    cpus: float
    gpus: float
    why: str


def num_cpus(handoff: Handoff) -> int:
    """Return the CPUs this node announces: the handoff's, or those this process may use."""
    if handoff.cpus_per_node is not None:
        return handoff.cpus_per_node
    usable = len(os.sched_getaffinity(0))
    # Local nodes share one machine.
    return max(1, usable // handoff.num_nodes) if handoff.cluster == "local" else usable


def ray_start_argv(
    handoff: Handoff, identity: NodeIdentity, settings: RaySettings, head_address: str | None
) -> tuple[str, ...]:
    """Return the command that runs this node's Ray until it is told to end; `head_address` None starts the head."""
    resources = json.dumps({f"{NODE_RESOURCE}{identity.node_index}": 1})
    role: tuple[str, ...] = (f"--address={head_address}",)
    if head_address is None:
        # The autoscaler's monitor has nothing to do in a fixed allocation.
        role = ("--head", "--port=0", *dashboard_options(settings.dashboard_port), "--no-monitor")
        if settings.client_server:
            # Its fixed default, 10001, would meet a second head on this host.
            port = free_port(settings.interface.address)
            role = (*role, f"--ray-client-server-port={port}")
    return (
        handoff.python,
        "-m",
        "ray.scripts.scripts",
        "start",
        *role,
        "--block",
        f"--node-ip-address={settings.interface.address}",
        f"--node-name={identity.node}",
        f"--num-cpus={num_cpus(handoff)}",
        f"--num-gpus={handoff.gpus_per_node}",
        f"--resources={resources}",
        f"--memory={settings.memory.workers}",
        f"--object-store-memory={settings.memory.store}",
        f"--temp-dir={settings.temp}",
        # The defaults are fixed: 10002 to 19999 and 52365. Zero lets each process bind what is free.
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--dashboard-agent-listen-port=0",
        "--disable-usage-stats",
    )


def dashboard_options(port: int | None) -> tuple[str, ...]:
    """Return the options of the head's dashboard: none, or one that only this host and who has the token can use."""
    if port is None:
        return ("--include-dashboard=false",)
    return (
        "--include-dashboard=true",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={port}",
    )


def start_ray(context: NodeContext, settings: RaySettings, head_address: str | None) -> Child:
    """Start this node's Ray as a child of this agent."""
    argv = ray_start_argv(context.handoff, context.identity, settings, head_address)
    return start_child("ray", argv, environ=settings.environ, log=context.log)


def wait_for_gcs(context: NodeContext, settings: RaySettings, ray: Child) -> int:
    """Return the port of the head's GCS once it accepts connections.

    Raises:
        MilesHpcError: if Ray ends or says nothing within the ready deadline.
    """

    def look() -> int | None:
        context.stop.raise_if_requested()
        raise_if_ended(context, settings, ray)
        for path in settings.temp.glob("session_2*/gcs_server_port_*"):
            text = path.read_text().strip()
            host = settings.interface.address
            if text.isdecimal() and is_reachable(host, int(text), timeout_s=1.0):
                return int(text)
        return None

    return wait_for(
        look,
        deadline_s=context.handoff.ready_deadline_s,
        late=lambda: NodeError(
            f"{context.node}: Ray's head did not open its port within {context.handoff.ready_deadline_s:g} s. "
            f"Its log {ray.log} ends:\n{ray.log_tail()}"
        ),
    )


def wait_for_head(context: NodeContext) -> HeadAddress:
    """Return the head's address as soon as the head has published it.

    Raises:
        NodeError: if there is none within the ready deadline.
    """

    def look() -> HeadAddress | None:
        context.stop.raise_if_requested()
        if context.rendezvous.is_stopped():
            raise HeadStoppedError
        return context.rendezvous.head()

    return wait_for(
        look,
        deadline_s=context.handoff.ready_deadline_s,
        late=lambda: NodeError(
            f"{context.node}: head node {context.identity.head_node} published no Ray address within "
            f"{context.handoff.ready_deadline_s:g} s. Look at {context.attempt.node_log(context.identity.head_node)}"
        ),
    )


class HeadStoppedError(MilesHpcError):
    """The head has ended the attempt; this node has nothing to add."""


def raise_if_ended(context: NodeContext, settings: RaySettings, ray: Child) -> None:
    """Raise if `ray` has ended.

    Raises:
        PreflightError: if Ray cannot be imported here. Asked only now, since an import costs every start seconds.
        NodeError: with what Ray printed, for any other cause.
    """
    code = ray.poll()
    if code is None:
        return
    done = run_short(
        [context.handoff.python, "-c", "import ray"],
        timeout_s=_IMPORT_TIMEOUT_S,
        environ=settings.environ,
    )
    if not done.ok:
        fault = Fault(
            where=f"{context.node}: Ray",
            found=done.describe(),
            expected=f"a Ray that {context.handoff.python} can import",
            fix="Install the node requirements there anew (env/ in the repository).",
        )
        raise PreflightError(str(fault))
    raise NodeError(
        f"{context.node}: Ray ended with code {code}; expected it to run as long as the job. "
        f"Its log {ray.log} ends:\n{ray.log_tail()}"
    )


@dataclass(slots=True)
class Membership:
    """The nodes that Ray sees, read from the watch probe's lines."""

    probe: Child
    reader: LineReader
    nodes: dict[int, NodeState] = field(default_factory=dict)

    def refresh(self) -> None:
        """Take in what the probe has printed since the last call."""
        for line in self.reader.lines():
            try:
                listed = json.loads(line)["nodes"]
            except (ValueError, KeyError, TypeError):
                continue
            self.nodes = {entry["index"]: NodeState(**entry) for entry in listed}

    def follow(self, address: str) -> None:
        """Tell the probe where the GCS is; a probe that has ended is noticed by who watches the children."""
        stream = self.probe.process.stdin
        if stream is not None:
            with contextlib.suppress(BrokenPipeError), stream:
                stream.write(f"{address}\n".encode())

    def dead(self) -> tuple[NodeState, ...]:
        """Return the nodes that have left Ray."""
        return tuple(node for node in self.nodes.values() if not node.alive)


def watch_membership(context: NodeContext, settings: RaySettings) -> Membership:
    """Start the probe that reports who is in the Ray cluster, once `Membership.follow` has told it where that is.

    Its import of Ray takes as long as the GCS takes to start, so both run at the same time.
    """
    argv = (
        context.handoff.python,
        "-m",
        "miles_hpc.probe.ray_watch",
        str(context.handoff.num_nodes),
    )
    probe, reader = start_reporter("ray_watch", argv, environ=settings.environ, log=context.log)
    return Membership(probe=probe, reader=reader)


def missing_from(
    handoff: Handoff, identity: NodeIdentity, nodes: Mapping[int, NodeState]
) -> tuple[str, ...]:
    """Return which nodes are not in Ray yet or announce too little, each with its reason."""
    missing = []
    for index, name in enumerate(identity.nodes):
        state = nodes.get(index)
        if state is None or not state.alive:
            missing.append(f"{name} (not in Ray)")
        elif state.gpus < handoff.gpus_per_node:
            missing.append(f"{name} ({state.gpus:g} of {handoff.gpus_per_node} GPUs)")
        elif handoff.cpus_per_node is not None and state.cpus < handoff.cpus_per_node:
            missing.append(f"{name} ({state.cpus:g} of {handoff.cpus_per_node} CPUs)")
    return tuple(missing)


class NodeFailedError(MilesHpcError):
    """Another node has reported that it cannot go on; ends the attempt with that node's code."""

    def __init__(self, failure: NodeFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.exit_code = failure.exit_code


def raise_if_node_failed(context: NodeContext) -> None:
    """Raise NodeFailedError for the first node that has reported a failure."""
    for failure in context.rendezvous.failures():
        raise NodeFailedError(failure)


def wait_until_ready(
    context: NodeContext, settings: RaySettings, ray: Child, membership: Membership
) -> None:
    """Return once every node of the job is in Ray with what it was asked for.

    Raises:
        MilesHpcError: at once when a node reports a failure or leaves; at the ready deadline with the names that are missing.
    """
    joined: set[int] = set()

    def look() -> bool | None:
        context.stop.raise_if_requested()
        raise_if_ended(context, settings, ray)
        raise_if_node_failed(context)
        membership.refresh()
        for index, state in membership.nodes.items():
            if state.alive and index not in joined and index < len(context.identity.nodes):
                joined.add(index)
                context.events.append(
                    Kind.NODE_JOINED, joined=context.identity.nodes[index], index=index
                )
        return None if missing_from(context.handoff, context.identity, membership.nodes) else True

    def late() -> MilesHpcError:
        missing = missing_from(context.handoff, context.identity, membership.nodes)
        logs = context.attempt.root
        return NodeError(
            f"ready barrier: after {context.handoff.ready_deadline_s:g} s {len(missing)} of "
            f"{context.handoff.num_nodes} nodes were missing: {', '.join(missing)}. "
            f"Look at the logs of these nodes in {logs} and at the job's output in {context.run.submission}."
        )

    wait_for(look, deadline_s=context.handoff.ready_deadline_s, late=late)
