"""One node agent from its first check to its exit code; `run_node` is the whole story.

The head's verdict is the job's: its agent exits with the verdict's code, the others with 0 once they have seen it. Knows the
order of the stages and nothing of how a stage works.
"""

import contextlib
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from miles_hpc import __version__
from miles_hpc.errors import Fault, MilesHpcError, NodeError, PreflightError
from miles_hpc.handoff import Handoff, read_handoff
from miles_hpc.node.context import NodeContext
from miles_hpc.node.doctor import examine
from miles_hpc.node.environment import (
    driver_environment,
    fill_placeholders,
    node_environment,
)
from miles_hpc.node.guard import Word
from miles_hpc.node.host_memory import watch_oom_kills
from miles_hpc.node.merge import EventMerge
from miles_hpc.node.nccl import sha256_of
from miles_hpc.node.nccl_watch import watching_nccl
from miles_hpc.node.network import choose_interface, free_port, host_identity
from miles_hpc.node.preflight import NodeFacts, check_node, compare_nodes, with_other_nodes
from miles_hpc.node.ray_cluster import (
    HeadStoppedError,
    RaySettings,
    start_ray,
    wait_for_gcs,
    wait_for_head,
    wait_until_ready,
    watch_membership,
)
from miles_hpc.node.ray_memory import ray_memory
from miles_hpc.node.reach import UnreachableError, prove_reach, serving_reach
from miles_hpc.node.rendezvous import HeadAddress, Rendezvous
from miles_hpc.node.sampling import sampling
from miles_hpc.node.scratch import collect_leftovers, make_ray_temp, make_scratch
from miles_hpc.node.supervise import (
    StopRequest,
    become_subreaper,
    start_child,
)
from miles_hpc.node.teardown import NodeResources
from miles_hpc.node.verdict import Outcome, conclude, judge
from miles_hpc.node.watch import watch_head, watch_worker
from miles_hpc.paths import RunDir
from miles_hpc.run.events import EventLog, Kind
from miles_hpc.run.resume import (
    Identity,
    new_attempt,
    wait_for_attempt,
    write_whole,
)
from miles_hpc.secret_store import Redaction, read_secrets
from miles_hpc.slurm import NodeIdentity, identify_node, is_job_live

log = logging.getLogger(__name__)


def run_node(run: RunDir, environ: Mapping[str, str], leave_word: Callable[[Word], None]) -> int:
    """Serve the job of `run` on this node and return the exit code.

    Raises:
        MilesHpcError: for what goes wrong before there is an attempt to write it to.
    """
    stop = StopRequest()
    stop.install()
    become_subreaper()
    handoff = read_handoff(run.handoff)
    identity = identify_node(handoff.cluster, environ)
    context = enter_attempt(run, handoff, identity, stop)
    resources = NodeResources(
        on_change=lambda folders: leave_word(make_word(context, folders)),
        oom=watch_oom_kills(identity.job_id),
    )
    resources.changed()
    merge = EventMerge(context.attempt.root, run.events)
    try:
        with sampling(context, resources):
            if handoff.doctor:
                examine(context, environ)
            else:
                serve(context, environ, resources, merge)
        done = "all nodes are fit" if handoff.doctor else "the driver ended with 0"
        outcome = Outcome(state="COMPLETED", exit_code=0, reason=done)
    except MilesHpcError as error:
        outcome = judge(context, with_other_nodes(context, error))
    except Exception as error:
        outcome = judge(context, NodeError(f"{context.node}: {type(error).__name__}: {error}"))
        conclude(context, resources, merge, outcome)
        raise
    return conclude(context, resources, merge, outcome)


def enter_attempt(
    run: RunDir, handoff: Handoff, identity: NodeIdentity, stop: StopRequest
) -> NodeContext:
    """Take this execution's attempt (head) or wait for it, and return what the rest of the agent works with."""
    if len(identity.nodes) != handoff.num_nodes:
        fault = Fault(
            where=f"{identity.node}: allocation",
            found=f"{len(identity.nodes)} nodes ({' '.join(identity.nodes)})",
            expected=f"{handoff.num_nodes}, as planned",
            fix="Submit the folder with the node count that its plan has.",
        )
        raise PreflightError(str(fault))
    key = Identity(
        job_id=identity.job_id,
        restart_count=identity.restart_count,
        cluster=identity.cluster,
        head_node=identity.head_node,
        started_s=time.time(),
    )
    if identity.is_head:
        attempt = new_attempt(
            run,
            key,
            resume=handoff.resume,
            max_attempts=handoff.max_attempts,
            is_live=lambda holder: is_job_live(holder.job_id, holder.cluster),
        )
    else:
        attempt = wait_for_attempt(
            run, identity.job_id, identity.restart_count, deadline_s=handoff.ready_deadline_s
        )
    context = NodeContext(
        run=run,
        handoff=handoff,
        identity=identity,
        attempt=attempt,
        rendezvous=Rendezvous(attempt.rendezvous, key.key),
        events=EventLog(attempt.node_events(identity.node), identity.node),
        stop=stop,
    )
    log_to(context.log, identity.node, context.redaction)
    if identity.is_head:
        context.rendezvous.open()
        context.events.append(
            Kind.ATTEMPT_STARTED,
            attempt=attempt.number,
            job_id=identity.job_id,
            restart_count=identity.restart_count,
            nodes=list(identity.nodes),
        )
    return context


def serve(
    context: NodeContext,
    environ: Mapping[str, str],
    resources: NodeResources,
    merge: EventMerge,
) -> None:
    """Bring this node up and stay until the attempt ends; returns only after success."""
    facts = check_node(context, environ)
    head = None if context.is_head else wait_for_head(context)
    settings = make_settings(context, environ, facts, head, resources)
    with watching_nccl(context, facts.nccl, settings.environ):
        if head is not None:
            require_reach(context, settings, head)
            resources.ray = start_ray(context, settings, head.ray_address)
            context.events.append(Kind.RAY_STARTED, address=settings.interface.address)
            watch_worker(context, settings, resources.ray, head.ray_address)
        else:
            lead(context, facts, settings, resources, merge)


def lead(
    context: NodeContext,
    facts: NodeFacts,
    settings: RaySettings,
    resources: NodeResources,
    merge: EventMerge,
) -> None:
    """Start the head's Ray, wait for the other nodes, and run the driver to its end."""
    resources.ray = start_ray(context, settings, None)
    membership = watch_membership(context, settings)
    resources.probe = membership.probe
    host = settings.interface.address
    with serving_reach(host, context.rendezvous.read_token()) as reach_port:
        gcs_port = wait_for_gcs(context, settings, resources.ray)
        here = HeadAddress(
            attempt=context.rendezvous.attempt_key,
            node=context.node,
            host=host,
            gcs_port=gcs_port,
            reach_port=reach_port,
            host_identity=host_identity(),
        )
        context.rendezvous.publish_head(here)
        address = here.ray_address
        membership.follow(address)
        context.events.append(Kind.RAY_STARTED, address=address)
        wait_until_ready(context, settings, resources.ray, membership)
    compare_nodes(context)
    context.events.append(Kind.CLUSTER_READY, num_nodes=context.handoff.num_nodes)
    start_driver(context, settings, address, resources)
    # Reading the whole NCCL library takes long enough to do it beside the driver's own start.
    write_resolved(context, facts, settings, address)
    children = {child.name: child for child in resources.children()}
    watch_head(context, settings, children, membership, merge)


def make_settings(
    context: NodeContext,
    environ: Mapping[str, str],
    facts: NodeFacts,
    head: HeadAddress | None,
    resources: NodeResources,
) -> RaySettings:
    """Make this job's folders on this node and the environment that points into them."""
    interface = choose_interface(context.identity, context.handoff.interface, head)
    for folder in collect_leftovers(facts.scratch_root):
        context.events.append(Kind.SCRATCH, removed=str(folder))
    try:
        resources.scratch = make_scratch(facts.scratch_root, context.job_tag)
        resources.changed()
    except OSError as error:
        fault = Fault(
            where=f"{context.node}: scratch",
            found=str(error),
            expected=f"a new folder below {facts.scratch_root}",
            fix="Look at who owns that path on this node.",
        )
        raise PreflightError(str(fault)) from error
    resources.ray_temp = make_ray_temp(facts.scratch_root, context.job_tag, context.node)
    resources.changed()
    temp = resources.ray_temp.path / "tmp"
    temp.mkdir()
    context.events.append(
        Kind.SCRATCH, path=str(resources.scratch.path), ray_temp=str(resources.ray_temp.path)
    )
    pin = context.handoff.nccl
    return RaySettings(
        environ=node_environment(
            context,
            environ,
            scratch=resources.scratch.path,
            temp=temp,
            nccl=facts.nccl if pin is not None and pin.preload else None,
            interface=interface,
        ),
        interface=interface,
        temp=resources.ray_temp.path,
        memory=ray_memory(context.handoff, facts.memory_left_bytes),
        client_server=facts.ray_client,
        dashboard_port=(
            free_port("127.0.0.1") if context.handoff.dashboard and context.is_head else None
        ),
    )


def require_reach(context: NodeContext, settings: RaySettings, head: HeadAddress) -> None:
    """Prove that this node and the head reach each other, before Ray tries to and only waits.

    Raises:
        PreflightError: with the way that fails.
    """

    def check_on() -> None:
        context.stop.raise_if_requested()
        if context.rendezvous.is_stopped():
            raise HeadStoppedError

    try:
        prove_reach(
            context.node,
            settings.interface.address,
            head,
            context.rendezvous.read_token(),
            check_on,
        )
    except UnreachableError as error:
        raise PreflightError(str(error)) from error


def start_driver(
    context: NodeContext, settings: RaySettings, address: str, resources: NodeResources
) -> None:
    """Start the driver on this head node."""
    argv = driver_argv(context, settings, address)
    environ = driver_environment(context, settings.environ, address, driver_secrets(context))
    resources.driver = start_child(
        "driver", argv, environ=environ, log=context.attempt.driver_log, cwd=context.run.root
    )
    context.events.append(Kind.DRIVER_STARTED, argv=list(argv), pid=resources.driver.process.pid)


def driver_secrets(context: NodeContext) -> dict[str, str]:
    """Return the driver's secrets, which from here on are taken out of what this agent writes.

    Raises:
        PreflightError: if their file is gone or not this user's alone.
    """
    source = context.handoff.secrets
    if source is None:
        return {}
    values, faults = read_secrets(source, f"{context.node}: secrets")
    if faults:
        raise PreflightError("\n".join(str(fault) for fault in faults))
    context.redaction.add(tuple(values.values()))
    return values


def driver_argv(context: NodeContext, settings: RaySettings, address: str) -> tuple[str, ...]:
    """Return the driver's command with the placeholders filled."""
    values = {
        "run_dir": str(context.run.root),
        "attempt_dir": str(context.attempt.root),
        "scratch_dir": settings.environ["MILES_HPC_SCRATCH"],
        "head_address": address,
        "num_nodes": str(context.handoff.num_nodes),
    }
    return fill_placeholders(context.handoff.driver_argv, values)


def write_resolved(
    context: NodeContext, facts: NodeFacts, settings: RaySettings, address: str
) -> None:
    """Write resolved.json: what really runs."""
    digest = None
    if facts.nccl is not None:
        with contextlib.suppress(OSError):
            digest = sha256_of(facts.nccl)
    resolved = {
        "miles_hpc": __version__,
        "python": facts.python_version,
        "ray": facts.ray_version,
        "head_address": address,
        "dashboard_port": settings.dashboard_port,
        "interface": settings.interface.name,
        "nodes": list(context.identity.nodes),
        "nccl": {
            "path": str(facts.nccl) if facts.nccl else None,
            "version_code": facts.nccl_code,
            "sha256": digest,
        },
        "driver_argv": list(driver_argv(context, settings, address)),
        "handoff_sha256": hashlib.sha256(context.run.handoff.read_bytes()).hexdigest(),
    }
    write_whole(context.attempt.resolved, json.dumps(resolved, indent=2) + "\n")


def make_word(context: NodeContext, folders: tuple[Path, ...]) -> Word:
    """Return what the guard must know to clean up after this agent."""
    return Word(
        node=context.node,
        is_head=context.is_head,
        attempt_root=str(context.attempt.root),
        attempt_key=context.rendezvous.attempt_key,
        job_tag=context.job_tag,
        folders=tuple(str(folder) for folder in folders),
    )


class _RedactingFormatter(logging.Formatter):
    """Writes a line without the driver's secrets, whatever text they came in."""

    def __init__(self, form: str, redaction: Redaction) -> None:
        super().__init__(form)
        self._redaction = redaction

    def format(self, record: logging.LogRecord) -> str:
        return self._redaction.clean(super().format(record))


def log_to(path: Path, node: str, redaction: Redaction) -> None:
    """Send this agent's log to the node's log file and to the job's output."""
    form = _RedactingFormatter(f"%(asctime)s {node} %(levelname)s %(message)s", redaction)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in (logging.FileHandler(path), logging.StreamHandler(sys.stderr)):
        handler.setFormatter(form)
        root.addHandler(handler)


def main(argv: list[str], environ: Mapping[str, str], leave_word: Callable[[Word], None]) -> int:
    """Run the agent for the run folder in `argv`; an error without an attempt to write it to goes to stderr."""
    if len(argv) != 1:
        sys.stderr.write("error: usage: python -m miles_hpc.node RUN_DIR\n")
        return NodeError.exit_code
    try:
        return run_node(RunDir(Path(argv[0]).resolve()), environ, leave_word)
    except MilesHpcError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
