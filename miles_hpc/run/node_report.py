"""What the checks found on a node, as the node writes it and the head, or the person who asked, reads it.

One finding is one line of the table of `miles-hpc doctor` and, where it is a fault, one line of a verdict. Knows no check.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from miles_hpc.errors import Fault
from miles_hpc.run.resume import read_object, write_whole

Level = Literal["ok", "warning", "fault"]
LEVELS: tuple[Level, ...] = ("fault", "warning", "ok")
"""Worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFinding:
    """What one check found on one node.

    Attributes:
        check: name of the check, the same on every node.
        level: a fault ends a job before its driver starts; a warning does not.
        fix: what to do; empty when all is well.
    """

    node: str
    check: str
    found: str
    expected: str
    fix: str = ""
    level: Level = "ok"

    def __str__(self) -> str:
        fault = Fault(
            where=f"{self.node}: {self.check}",
            found=self.found,
            expected=self.expected,
            fix=self.fix,
        )
        return str(fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """report-NODE.json: all that one node's checks found, and what must be equal on all nodes.

    Attributes:
        attempt: key of the execution that wrote it.
        facts: values to compare between nodes, by what they are of.
        clock_s: this node's clock at the end of its checks.
        clock_ahead_s: bounds of this node's clock minus the head's, where an exchange with the head told them.
    """

    attempt: str
    node: str
    findings: tuple[NodeFinding, ...]
    facts: Mapping[str, str]
    clock_s: float
    clock_ahead_s: tuple[float, float] | None = None

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(asdict(self)) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """doctor.json: what all nodes' checks found."""

    nodes: tuple[str, ...]
    findings: tuple[NodeFinding, ...] = field(default=())

    @property
    def is_fit(self) -> bool:
        """No check found a fault."""
        return not faults_of(self.findings)

    def to_json(self) -> str:
        """Return the file's text, which `miles-hpc doctor --json` also prints."""
        return json.dumps({"is_fit": self.is_fit, **asdict(self)}, indent=2)


def faults_of(findings: Iterable[NodeFinding]) -> tuple[NodeFinding, ...]:
    """Return the faults among `findings`, sorted by node, then check."""
    found = (finding for finding in findings if finding.level == "fault")
    return tuple(sorted(found, key=lambda finding: (finding.node, finding.check)))


def read_node_report(path: Path, attempt: str) -> NodeReport | None:
    """Return the report at `path`; None while there is none, or when another execution wrote it."""
    raw = read_object(path)
    if raw is None or raw.get("attempt") != attempt:
        return None
    bounds = raw.get("clock_ahead_s")
    known = {**raw, "findings": _findings(raw)}
    known["clock_ahead_s"] = (bounds[0], bounds[1]) if isinstance(bounds, list) else None
    return NodeReport(**known)  # type: ignore[arg-type]


def write_doctor_report(path: Path, report: DoctorReport) -> None:
    """Write doctor.json."""
    write_whole(path, report.to_json() + "\n")


def read_doctor_report(path: Path) -> DoctorReport | None:
    """Return the report at `path`, or None when there is none."""
    raw = read_object(path)
    nodes = None if raw is None else raw.get("nodes")
    if raw is None or not isinstance(nodes, list):
        return None
    return DoctorReport(nodes=tuple(str(node) for node in nodes), findings=_findings(raw))


def _findings(raw: Mapping[str, object]) -> tuple[NodeFinding, ...]:
    listed = raw.get("findings")
    return tuple(NodeFinding(**entry) for entry in listed) if isinstance(listed, list) else ()
