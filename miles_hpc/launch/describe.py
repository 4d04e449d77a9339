"""A plan and a rule as text for a person.

Knows the shapes of `Plan` and `Rule`, nothing of how they are made.
"""

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from miles_hpc.engine.compose import all_rules, rule_level_text
from miles_hpc.errors import SpecError, SubmitError
from miles_hpc.plan.expansion import expand_placement, placement_lines
from miles_hpc.plan.page import render_page
from miles_hpc.plan.plan import Plan
from miles_hpc.plan.timeline import memory_lines
from miles_hpc.run.report import Status

_WIDTH = 100


def describe_plan(plan: Plan, *, placement: bool = False) -> str:
    """Return layout, memory by phase, environment with reasons, driver command and what the rules say, one thing a line.

    No line is wider than 100 columns.

    Args:
        plan: the plan.
        placement: add where every rank and rollout engine is.
    """
    lines = [f"{plan.name}: engine {plan.engine}", "", "layout"]
    lines += [f"  {name:<18}{value}" for name, value in asdict(plan.layout).items()]
    lines += ["", "rollout"]
    lines += [f"  {name:<18}{value}" for name, value in asdict(plan.rollout).items()]
    lines += ["", "memory", *memory_lines(plan.memory), "", "environment"]
    for variable in plan.environment:
        lines += _folded(f"  {variable.name}={variable.value}" + _scope(variable.scope))
        lines += textwrap.wrap(
            f"{variable.why} ({variable.source})",
            _WIDTH,
            initial_indent="      ",
            subsequent_indent="      ",
        )
    lines += ["", "driver", *_command_lines(plan.driver_argv)]
    if placement:
        lines += ["", "placement", *placement_lines(expand_placement(plan.layout, plan.rollout))]
    if plan.findings or plan.notes:
        lines += ["", "notes"]
        notes = [*(f"{finding.level}: {finding}" for finding in plan.findings), *plan.notes]
        for note in notes:
            lines += textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="      ")
    return "\n".join(lines) + "\n"


def status_lines(now: Status) -> Sequence[str]:
    """Return what is known of a run, one thing a line."""
    known = {
        "run": now.run_dir,
        "job": now.job_id,
        "state": now.state,
        "attempt": now.attempt or None,
        "exit code": now.exit_code,
        "driver exit code": now.driver_exit_code,
        "reason": now.reason or None,
    }
    return [f"{name:<17}{value}" for name, value in known.items() if value is not None]


def write_page(plan: Plan, would_fit: Sequence[str], path: Path) -> None:
    """Write the plan's HTML page to `path`.

    Raises:
        SubmitError: if the file cannot be written.
    """
    try:
        path.write_text(render_page(plan, would_fit), encoding="utf-8")
    except OSError as error:
        raise SubmitError(
            f"--html {path}: {error}; expected a file that can be written. Name another one."
        ) from error


def explain_rule(name: str) -> str:
    """Return the page of the rule with the id `name`.

    Raises:
        SpecError: if there is no such rule.
    """
    rules = {rule.id: rule for rule in all_rules()}
    rule = rules.get(name.upper())
    if rule is None:
        near = get_close_matches(name.upper(), rules, n=1)
        raise SpecError(
            f"rule {name!r}: found no rule with this id; expected one of {', '.join(rules)}."
            + (
                f" The nearest is {near[0]}."
                if near
                else " Messages name the id of the rule they come from."
            )
        )
    parts = [f"{rule.id}: {rule.title}", textwrap.fill(rule.reason, _WIDTH)]
    if rule.arithmetic:
        parts.append(f"Arithmetic: {rule.arithmetic}")
    parts.append(f"Level: {rule_level_text(rule)}")
    parts.append(f"Source: {rule.source}")
    return "\n\n".join(parts)


def _command_lines(argv: Sequence[str]) -> list[str]:
    """Return the command over lines that a shell reads as one, but where a single word is wider than the terminal."""
    words = [shlex.quote(word) for word in argv]
    rows = [words[0]]
    for word in words[1:]:
        if len(rows[-1]) + len(word) < _WIDTH - 8:
            rows[-1] += f" {word}"
        else:
            rows.append(word)
    ends = [" \\"] * (len(rows) - 1) + [""]
    starts = ["  "] + ["      "] * (len(rows) - 1)
    return [
        line
        for start, row, end in zip(starts, rows, ends, strict=True)
        for line in _folded(start + row + end)
    ]


def _folded(line: str) -> list[str]:
    """Return `line` cut where the terminal ends; `--json` and the page have long values whole."""
    rest = _WIDTH - 6
    cuts = range(_WIDTH, len(line), rest)
    return [line[:_WIDTH], *(" " * 6 + line[cut : cut + rest] for cut in cuts)]


def _scope(scope: str) -> str:
    return "" if scope == "ray" else f"   [{scope} only]"
