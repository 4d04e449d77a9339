"""The checks between nodes: equal versions, equal files, clocks, and a run folder that is really shared.

Pure: takes the reports that the nodes have written. A value that differs is told for each node that differs from most.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from miles_hpc.handoff import Handoff
from miles_hpc.node.checks.observation import Observation
from miles_hpc.run.node_report import Level, NodeFinding, NodeReport

# Events of several nodes are merged by their clocks, and file systems and credentials (munge) mind minutes.
CLOCK_SKEW_S = 5.0
_PATH = "path "

# What must be equal, what happens when it is not, and what to do about it.
_SAME: Mapping[str, tuple[Level, str]] = {
    "Python": ("fault", "Use one interpreter on all nodes: Ray refuses another version."),
    "Ray": (
        "fault",
        "Install the same node requirements on all nodes: Ray refuses another version.",
    ),
    "torch": ("fault", "Install the same node requirements on all nodes."),
    "code": (
        "fault",
        "The node sees other code in the run folder: look at its mount of that file system.",
    ),
    "driver": ("warning", "Have the nodes brought to one driver."),
    "GPU model": ("warning", "Ask for nodes of one type (cluster.constraint or cluster.gpu_type)."),
}
_OTHER_FILES: tuple[Level, str] = (
    "warning",
    "Copy it anew to the node that differs, or share one copy.",
)


def facts_to_compare(seen: Observation) -> dict[str, str]:
    """Return what must be equal on all nodes, by the name of the check."""
    interpreter = seen.interpreter or {}
    facts = {
        "Python": interpreter.get("python"),
        "Ray": interpreter.get("ray"),
        "torch": interpreter.get("torch"),
        "code": seen.code,
    }
    if seen.gpus is not None and not seen.gpus.error:
        facts["driver"] = seen.gpus.driver
        facts["GPU model"] = ", ".join(sorted({str(gpu.name) for gpu in seen.gpus.gpus}))
    known = {name: str(value) for name, value in facts.items() if value is not None}
    looks = {f"{_PATH}{path}": look for path, (look, _) in seen.paths.items() if look is not None}
    return {**known, **looks}


def compare_facts(reports: Sequence[NodeReport]) -> Iterable[NodeFinding]:
    """Every node has the value that most have; of equally many, the first node's."""
    if len(reports) < 2:
        return
    names = dict.fromkeys(name for report in reports for name in report.facts)
    for name in names:
        values = [report.facts[name] for report in reports if name in report.facts]
        common = Counter(values).most_common(1)[0][0]
        level, fix = _SAME.get(name, _OTHER_FILES)
        check = "same files" if name.startswith(_PATH) else f"same {name}"
        shown = f"{name.removeprefix(_PATH)}: " if name.startswith(_PATH) else ""
        for report in reports:
            value = report.facts.get(name)
            if value is None:
                continue  # the node's own checks have said what is wrong
            differs = value != common
            yield NodeFinding(
                node=report.node,
                check=check,
                found=f"{shown}{value}",
                expected=f"{common}, as on {values.count(common)} of {len(values)} nodes"
                if differs
                else "the same on all nodes",
                fix=fix if differs else "",
                level=level if differs else "ok",
            )


def compare_clocks(
    bounds: Mapping[str, tuple[float, float]],
) -> Iterable[NodeFinding]:
    """No node's clock is provably more than a few seconds before or behind the head's.

    Args:
        bounds: of each node, the least and the most that its clock can be ahead of the head's, in seconds.
    """
    for node, (least_s, most_s) in bounds.items():
        ahead, behind = least_s > CLOCK_SKEW_S, most_s < -CLOCK_SKEW_S
        most_apart_s = max(abs(least_s), abs(most_s))
        is_close = most_apart_s < CLOCK_SKEW_S
        found = f"within {most_apart_s:.3f} s" if is_close else "no difference that shows"
        if ahead:
            found = f"at least {least_s:.1f} s ahead of the head's"
        if behind:
            found = f"at least {-most_s:.1f} s behind the head's"
        yield NodeFinding(
            node=node,
            check="clock",
            found=found,
            expected=f"at most {CLOCK_SKEW_S:g} s from the head's",
            fix="Start chrony or ntpd on the node." if ahead or behind else "",
            level="warning" if ahead or behind else "ok",
        )


def clock_bounds(report: NodeReport, before_s: float, read_s: float) -> tuple[float, float]:
    """Return the least and the most that a node's clock is ahead of the head's.

    Its report was written after the head took the attempt and before the head read it, so two times of the head's clock
    enclose the node's stamp; an exchange over a connection, where there was one, is narrower.
    """
    if report.clock_ahead_s is not None:
        return report.clock_ahead_s
    return report.clock_s - read_s, report.clock_s - before_s


def find_missing(nodes: Iterable[str], handoff: Handoff, waited_s: float) -> Iterable[NodeFinding]:
    """A node whose report the head cannot read does not share the run folder, or never started."""
    for node in nodes:
        yield NodeFinding(
            node=node,
            check="run folder",
            found=f"nothing from this node in {handoff.run_dir} after {waited_s:g} s",
            expected="what one node writes is read on all",
            fix="Put job.run_root on a file system that all nodes share; see submission/ whether the node started.",
            level="fault",
        )
