"""Is every node fit to run the job? Every fault is found before anything is started, and those of all nodes are told at once.

Each node runs the checks of `node.checks`, writes its report and ends on a fault; the head collects what the other nodes
report, and compares them once all are in. Changes nothing on the node.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import MilesHpcError, PreflightError
from miles_hpc.node.checks.across import (
    clock_bounds,
    compare_clocks,
    compare_facts,
    facts_to_compare,
)
from miles_hpc.node.checks.all_checks import check_all
from miles_hpc.node.checks.observation import Observation, observe
from miles_hpc.node.context import NodeContext
from miles_hpc.node.ray_cluster import NodeFailedError
from miles_hpc.node.supervise import POLL_S
from miles_hpc.run.events import Kind
from miles_hpc.run.node_report import NodeFinding, NodeReport, faults_of
from miles_hpc.run.resume import read_identity

# A node that is not fit ends the job; the others have this long to say whether they are.
_COLLECT_S = 15.0
# Nodes that fail later for one cause, such as a network that none has, fail at almost the same time.
_SETTLE_S = 1.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What preflight found out and later stages need.

    Attributes:
        nccl: the library that was checked; None when the job has no pin.
        memory_bytes: what this job may use here, by cgroup or machine.
        memory_left_bytes: what of it is not held yet, or by files alone.
        ray_client: Ray's client server would start and needs a port of its own.
    """

    scratch_root: Path
    nccl: Path | None
    nccl_code: int | None
    memory_bytes: int
    memory_left_bytes: int
    python_version: str
    ray_version: str
    ray_client: bool


def check_node(context: NodeContext, environ: Mapping[str, str]) -> NodeFacts:
    """Return the facts of a node that is fit, and leave its report for the head.

    Raises:
        PreflightError: with every fault, one a line.
    """
    start_s = time.monotonic()
    seen = observe(context, environ)
    findings = check_all(seen, context.handoff)
    faults = faults_of(findings)
    if not seen.run_folder_error:
        context.rendezvous.write_report(make_report(context, seen, findings))
    warn(context, findings)
    if faults or seen.scratch_root is None:
        raise PreflightError("\n".join(str(fault) for fault in faults))
    report = seen.interpreter or {}
    path, code = report.get("nccl_path"), report.get("nccl_code")
    facts = NodeFacts(
        scratch_root=seen.scratch_root,
        nccl=Path(str(path)) if path is not None else None,
        nccl_code=code if isinstance(code, int) else None,
        memory_bytes=seen.memory_bytes,
        memory_left_bytes=seen.memory_left_bytes,
        python_version=str(report.get("python")),
        ray_version=str(report.get("ray")),
        ray_client=bool(report.get("ray_client")),
    )
    context.events.append(
        Kind.PREFLIGHT,
        seconds=round(time.monotonic() - start_s, 3),
        python=facts.python_version,
        ray=facts.ray_version,
        memory_bytes=facts.memory_bytes,
        memory_left_bytes=facts.memory_left_bytes,
        scratch_root=str(facts.scratch_root),
    )
    if facts.nccl is not None:
        context.events.append(Kind.NCCL, path=str(facts.nccl), version_code=facts.nccl_code)
    return facts


def make_report(
    context: NodeContext,
    seen: Observation,
    findings: tuple[NodeFinding, ...],
    clock_ahead_s: tuple[float, float] | None = None,
) -> NodeReport:
    """Return what this node tells the head."""
    return NodeReport(
        attempt=context.rendezvous.attempt_key,
        node=context.node,
        findings=findings,
        facts=facts_to_compare(seen),
        clock_s=time.time(),
        clock_ahead_s=clock_ahead_s,
    )


def warn(context: NodeContext, findings: tuple[NodeFinding, ...]) -> None:
    """Write an event for each warning."""
    for finding in findings:
        if finding.level == "warning":
            log.warning("%s", finding)
            context.events.append(Kind.WARNING, message=str(finding))


def compare_nodes(context: NodeContext) -> None:
    """Compare the reports of all nodes; called by the head when all have joined.

    Raises:
        PreflightError: with every difference that the job cannot live with.
    """
    findings = differences(context, read_reports(context))
    warn(context, findings)
    faults = faults_of(findings)
    if faults:
        raise PreflightError("\n".join(str(fault) for fault in faults))


def read_reports(context: NodeContext) -> tuple[NodeReport, ...]:
    """Return the reports that are there, in the order of the nodes."""
    found = (context.rendezvous.report(node) for node in context.identity.nodes)
    return tuple(report for report in found if report is not None)


def differences(
    context: NodeContext, reports: tuple[NodeReport, ...], read_s: Mapping[str, float] | None = None
) -> tuple[NodeFinding, ...]:
    """Return what a comparison of `reports` finds.

    Args:
        context: the head's.
        reports: of the nodes that have written one.
        read_s: when the head first saw each report, by its clock; left out, now.
    """
    identity = read_identity(context.attempt)
    before_s = 0.0 if identity is None else identity.started_s
    now_s = time.time()
    bounds = {
        report.node: clock_bounds(report, before_s, (read_s or {}).get(report.node, now_s))
        for report in reports
        if report.node != context.node
    }
    return (*compare_facts(reports), *compare_clocks(bounds))


def with_other_nodes(context: NodeContext, error: MilesHpcError) -> MilesHpcError:
    """Return the head's `error` with the faults of all other nodes, when it is a node that is not fit.

    Waits until every node has reported or failed, but not for long: one may never come. A doctor's head has waited already.
    """
    is_own = isinstance(error, PreflightError)
    is_others = isinstance(error, NodeFailedError) and error.failure.kind == PreflightError.__name__
    knows_all = context.handoff.doctor or len(context.identity.nodes) == 1 or not context.is_head
    if knows_all or not (is_own or is_others) or context.stop.signal_name is not None:
        return error
    start_s = time.monotonic()
    while context.stop.count == 0:
        waited_s = time.monotonic() - start_s
        if waited_s > _COLLECT_S or (waited_s > _SETTLE_S and not _silent_nodes(context)):
            break
        time.sleep(POLL_S)
    lines = str(error).splitlines()
    for failure in context.rendezvous.failures():
        if failure.kind == PreflightError.__name__:
            lines += failure.message.splitlines()
    for report in read_reports(context):
        lines += [str(fault) for fault in faults_of(report.findings)]
    return PreflightError("\n".join(sorted(dict.fromkeys(lines))))


def _silent_nodes(context: NodeContext) -> frozenset[str]:
    failed = {failure.node for failure in context.rendezvous.failures()}
    told = context.rendezvous.reported() | failed | {context.node}
    return frozenset(context.identity.nodes) - told
