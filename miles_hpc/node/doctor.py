"""A node agent that only looks: the checks of a job's preflight on every node, compared on the head; no Ray, no driver.

    every node   checks itself, finds its interface, writes its report
    head         waits for the reports, compares them, writes doctor.json; its exit code is 0, or 10 with all faults

Knows no single check.
"""

import time
from collections.abc import Mapping

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.node.checks.across import find_missing
from miles_hpc.node.checks.all_checks import check_all
from miles_hpc.node.checks.observation import observe
from miles_hpc.node.context import NodeContext
from miles_hpc.node.network import Interface, choose_interface, host_identity
from miles_hpc.node.preflight import differences, make_report, warn
from miles_hpc.node.reach import UnreachableError, prove_reach, serving_reach
from miles_hpc.node.rendezvous import HeadAddress
from miles_hpc.node.supervise import POLL_S
from miles_hpc.run.node_report import (
    DoctorReport,
    NodeFinding,
    NodeReport,
    faults_of,
    write_doctor_report,
)

_CHECK = "network"


def examine(context: NodeContext, environ: Mapping[str, str]) -> None:
    """Check this node; the head also waits for the others and writes doctor.json.

    Raises:
        PreflightError: on the head, with the faults of all nodes.
    """
    if not context.is_head:
        examine_worker(context, environ)
        return
    interface, network = find_interface(context, None)
    if interface is None:
        report_all(context, environ, network)
        return
    with serving_reach(interface.address, context.rendezvous.read_token()) as port:
        context.rendezvous.publish_head(
            HeadAddress(
                attempt=context.rendezvous.attempt_key,
                node=context.node,
                host=interface.address,
                gcs_port=None,
                reach_port=port,
                host_identity=host_identity(),
            )
        )
        report_all(context, environ, network)


def examine_worker(context: NodeContext, environ: Mapping[str, str]) -> None:
    """Check this node, and that it reaches the head, and write its report."""
    seen = observe(context, environ)
    head = wait_for_address(context)
    network: tuple[NodeFinding, ...] = ()
    clock_ahead_s = None
    if head is not None:
        interface, network = find_interface(context, head)
        if interface is not None:
            try:
                clock_ahead_s = prove_reach(
                    context.node,
                    interface.address,
                    head,
                    context.rendezvous.read_token(),
                    context.stop.raise_if_requested,
                )
            except UnreachableError as error:
                network = (_finding(context, error.fault),)
    findings = (*check_all(seen, context.handoff), *network)
    warn(context, findings)
    context.rendezvous.write_report(make_report(context, seen, findings, clock_ahead_s))


def report_all(
    context: NodeContext, environ: Mapping[str, str], network: tuple[NodeFinding, ...]
) -> None:
    """Check the head, wait for the other nodes and write doctor.json."""
    start_s = time.monotonic()
    seen = observe(context, environ)
    own = make_report(context, seen, (*check_all(seen, context.handoff), *network))
    deadline_s = context.handoff.ready_deadline_s
    others, read_s = collect(context, start_s + deadline_s)
    reports = (own, *others)
    there = {report.node for report in reports}
    missing = [node for node in context.identity.nodes if node not in there]
    findings = (
        *(finding for report in reports for finding in report.findings),
        *_shared(context, others),
        *find_missing(missing, context.handoff, deadline_s),
        *differences(context, reports, read_s),
    )
    warn(context, findings)
    write_doctor_report(
        context.attempt.doctor, DoctorReport(nodes=context.identity.nodes, findings=findings)
    )
    faults = faults_of(findings)
    if faults:
        raise PreflightError("\n".join(str(fault) for fault in faults))


def collect(
    context: NodeContext, end_s: float
) -> tuple[tuple[NodeReport, ...], Mapping[str, float]]:
    """Return the other nodes' reports that come before `end_s`, and when each was first seen by this node's clock."""
    reports: dict[str, NodeReport] = {}
    read_s: dict[str, float] = {}
    others = context.identity.nodes[1:]
    while len(reports) < len(others) and time.monotonic() < end_s:
        context.stop.raise_if_requested()
        for node in sorted(context.rendezvous.reported() & set(others) - set(reports)):
            report = context.rendezvous.report(node)
            if report is not None:
                reports[node], read_s[node] = report, time.time()
        time.sleep(POLL_S)
    return tuple(reports[node] for node in others if node in reports), read_s


def wait_for_address(context: NodeContext) -> HeadAddress | None:
    """Return where the head answers; None if it does not say so in time."""
    end_s = time.monotonic() + context.handoff.ready_deadline_s / 2
    while time.monotonic() < end_s and not context.rendezvous.is_stopped():
        context.stop.raise_if_requested()
        head = context.rendezvous.head()
        if head is not None:
            return head
        time.sleep(POLL_S)
    return None


def find_interface(
    context: NodeContext, head: HeadAddress | None
) -> tuple[Interface | None, tuple[NodeFinding, ...]]:
    """Return the interface that a job would use on this node, with the finding that says so or why there is none."""
    try:
        chosen = choose_interface(context.identity, context.handoff.interface, head)
    except PreflightError as error:
        return None, (
            NodeFinding(
                node=context.node,
                check=_CHECK,
                found=str(error).removeprefix(f"{context.node}: {_CHECK}: found "),
                expected="one interface that every node of the job reaches",
                fix="Set network.interface in the spec or the site profile.",
                level="fault",
            ),
        )
    return chosen, (
        NodeFinding(
            node=context.node,
            check=_CHECK,
            found=f"{chosen.name} {chosen.address}",
            expected="an address that the other nodes reach",
        ),
    )


def _finding(context: NodeContext, fault: Fault) -> NodeFinding:
    return NodeFinding(
        node=context.node,
        check=_CHECK,
        found=fault.found,
        expected=fault.expected,
        fix=fault.fix,
        level="fault",
    )


def _shared(context: NodeContext, others: tuple[NodeReport, ...]) -> tuple[NodeFinding, ...]:
    """Return that the run folder is shared, for each node that has read the head's files and been read by the head."""
    return tuple(
        NodeFinding(
            node=report.node,
            check="run folder",
            found=f"{context.handoff.run_dir}: written and read both ways",
            expected="what one node writes is read on all",
        )
        for report in others
    )
