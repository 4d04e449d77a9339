"""What a rule says about a spec: findings with an id, and the refusal made of them.

Knows no rule. `Rule` is the page that `miles-hpc explain ID` prints; `Check` ties a rule to the function that applies it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from miles_hpc.errors import PlanError
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

Level = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that a spec breaks (error) or should know about (warning).

    Attributes:
        id: the rule's id, such as MH203.
        where: the keys concerned, with file:line when the spec came from files.
        message: what was found, what was expected and what to do, with the arithmetic.
        keys: key paths of the spec, the one to change first.
        reason: why [rules] of the spec gives this rule its level; empty when it does not.
    """

    id: str
    level: Level
    where: str
    message: str
    keys: tuple[str, ...]
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.id} {self.where}: {self.message}"
        return (
            f"{text} [level {self.level} set by rules.{self.id}: {self.reason}]"
            if self.reason
            else text
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check found wrong, before it gets the rule's id.

    Attributes:
        keys: key paths of the spec, the one to change first.
        level: "error" refuses the plan.
    """

    keys: tuple[str, ...]
    found: str
    expected: str
    fix: str
    level: Level = "error"


@dataclass(frozen=True, slots=True)
class Check:
    """A rule and the pure function that yields what breaks it."""

    rule: Rule
    verdicts: Callable[[JobSpec], Iterable[Verdict]]


def run_checks(checks: Sequence[Check], spec: JobSpec) -> tuple[Finding, ...]:
    """Return everything that `checks` find in `spec`, in their order, at the levels that its [rules] give."""
    return tuple(
        _finding(check.rule, verdict, spec) for check in checks for verdict in check.verdicts(spec)
    )


def _finding(rule: Rule, verdict: Verdict, spec: JobSpec) -> Finding:
    chosen = None if rule.has_fixed_level else spec.rules.get(rule.id)
    return Finding(
        id=rule.id,
        level=verdict.level if chosen is None else chosen.level,
        where=", ".join(verdict.keys),
        message=f"{verdict.found}; expected {verdict.expected}. {verdict.fix}",
        keys=verdict.keys,
        reason="" if chosen is None else chosen.reason,
    )


def locate(
    findings: Iterable[Finding], position: Callable[[str], str | None]
) -> tuple[Finding, ...]:
    """Return `findings` with each `where` led by the file:line of its first key that was written in a file."""
    located = []
    for finding in findings:
        lines = [line for key in finding.keys if (line := position(key)) is not None]
        where = f"{lines[0]}: {finding.where}" if lines else finding.where
        located.append(replace(finding, where=where))
    return tuple(located)


def errors_of(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings that refuse the plan."""
    return tuple(finding for finding in findings if finding.level == "error")


def refuse(findings: Iterable[Finding], would_fit: Sequence[str] = ()) -> None:
    """Raise PlanError listing every error in `findings`; do nothing when there is none.

    Args:
        findings: all findings; warnings among them are left out.
        would_fit: changes that would make the plan pass, one phrase each.
    """
    errors = errors_of(findings)
    if not errors:
        return
    lines = [str(finding) for finding in errors]
    if would_fit:
        lines.append("What would fit: " + "; or ".join(would_fit) + ".")
    raise PlanError("\n".join(lines))
