"""A verdict names the faults of all nodes, and nodes that differ end the job before its driver."""

import threading
import time

import pytest

from miles_hpc.errors import DriverError, PreflightError
from miles_hpc.node import preflight
from miles_hpc.node.preflight import compare_nodes, with_other_nodes
from miles_hpc.node.ray_cluster import NodeFailedError
from miles_hpc.node.rendezvous import NodeFailure
from miles_hpc.run.events import read_events
from miles_hpc.run.node_report import NodeFinding, NodeReport


def finding(node, level="fault", check="scratch"):
    return NodeFinding(node=node, check=check, found="F", expected="E", fix="Mend it.", level=level)


def report(context, node, *findings, clock_s=None, **facts):
    written = NodeReport(
        attempt=context.rendezvous.attempt_key,
        node=node,
        findings=findings,
        facts=facts,
        clock_s=time.time() if clock_s is None else clock_s,
    )
    context.rendezvous.write_report(written)


def failure(node, kind="PreflightError", message=None):
    text = message or f"{node}: NCCL: found F; expected E. Mend it."
    return NodeFailure(node=node, kind=kind, message=text, exit_code=10)


@pytest.fixture
def head(make_context):
    context = make_context()
    context.rendezvous.open()
    return context


def test_the_heads_fault_and_those_of_all_others_stand_in_one_error(head):
    report(head, "n2", finding("n2"), finding("n2", "warning", "open files"))
    head.rendezvous.report_failure(failure("n3"))
    error = with_other_nodes(head, PreflightError("n1: memory: found F; expected E. Mend it."))
    assert isinstance(error, PreflightError)
    assert str(error).splitlines() == [
        "n1: memory: found F; expected E. Mend it.",
        "n2: scratch: found F; expected E. Mend it.",
        "n3: NCCL: found F; expected E. Mend it.",
    ]


def test_a_fault_that_was_reported_twice_stands_there_once(head):
    report(head, "n2", finding("n2"))
    report(head, "n3")
    told = failure("n2", message=str(finding("n2")))
    head.rendezvous.report_failure(told)
    assert str(with_other_nodes(head, NodeFailedError(told))) == str(finding("n2"))


def test_the_head_waits_for_a_node_that_is_still_checking(head):
    report(head, "n2")

    def late():
        time.sleep(0.5)
        report(head, "n3", finding("n3"))

    thread = threading.Thread(target=late)
    thread.start()
    error = with_other_nodes(head, PreflightError("n1: memory: found F; expected E. Mend it."))
    thread.join(timeout=10)
    assert "n3: scratch" in str(error)


def test_nodes_that_fail_together_after_their_checks_are_all_named(head):
    for node in ("n2", "n3"):
        report(head, node)

    def late():
        time.sleep(0.3)
        head.rendezvous.report_failure(failure("n3"))

    thread = threading.Thread(target=late)
    thread.start()
    error = with_other_nodes(head, NodeFailedError(failure("n2")))
    thread.join(timeout=10)
    assert [line[:2] for line in str(error).splitlines()] == ["n2", "n3"]


def test_a_node_that_never_speaks_holds_the_verdict_only_for_the_deadline(head, monkeypatch):
    monkeypatch.setattr(preflight, "_COLLECT_S", 0.2)
    report(head, "n2", finding("n2"))
    error = with_other_nodes(head, PreflightError("n1: memory: found F; expected E. Mend it."))
    assert len(str(error).splitlines()) == 2


def test_only_a_node_that_is_not_fit_makes_the_head_ask(head, make_context):
    gone = DriverError("the driver ended with 1")
    assert with_other_nodes(head, gone) is gone
    late = NodeFailedError(failure("n2", kind="NodeError"))
    assert with_other_nodes(head, late) is late
    own = PreflightError("n2: x")
    assert with_other_nodes(make_context(1), own) is own


def test_a_report_of_another_execution_is_not_believed(head):
    stale = NodeReport(attempt="6-0", node="n2", findings=(finding("n2"),), facts={}, clock_s=0.0)
    head.rendezvous.write_report(stale)
    assert head.rendezvous.report("n2") is None
    assert preflight.read_reports(head) == ()


def test_nodes_with_other_rays_end_the_job(head):
    for node, version in (("n1", "2.60.0"), ("n2", "2.59.0"), ("n3", "2.60.0")):
        report(head, node, Ray=version)
    with pytest.raises(PreflightError, match=r"n2: same Ray: found 2\.59\.0; expected 2\.60\.0"):
        compare_nodes(head)


def test_a_clock_far_ahead_is_an_event_and_no_end(head):
    report(head, "n1")
    report(head, "n2", clock_s=time.time() + 3600)
    compare_nodes(head)
    (event,) = [e for e in read_events(head.events.path) if e["kind"] == "warning"]
    assert "n2: clock: found at least" in event["message"]
    assert "ahead of the head's" in event["message"]
