"""A plan and a rule as text for a person.

Knows the shapes of `Plan` and `Rule`, nothing of how they are made.
"""

import shlex
import textwrap
from dataclasses import asdict
from difflib import get_close_matches

from miles_hpc.engine.compose import all_rules
from miles_hpc.errors import SpecError
from miles_hpc.plan.plan import Plan

_WIDTH = 100


def describe_plan(plan: Plan) -> str:
    """Return layout, environment with reasons, driver command and what the rules say, one thing a line."""
    lines = [f"{plan.name}: engine {plan.engine}", "", "layout"]
    lines += [f"  {name:<18}{value}" for name, value in asdict(plan.layout).items()]
    lines += ["", "rollout"]
    lines += [f"  {name:<18}{value}" for name, value in asdict(plan.rollout).items()]
    lines += ["", "environment"]
    for variable in plan.environment:
        lines.append(f"  {variable.name}={variable.value}" + _scope(variable.scope))
        lines += textwrap.wrap(
            f"{variable.why} ({variable.source})",
            _WIDTH,
            initial_indent="      ",
            subsequent_indent="      ",
        )
    command = shlex.join(plan.driver_argv) if plan.driver_argv else "(none in this version)"
    lines += ["", "driver", f"  {command}"]
    if plan.findings or plan.notes:
        lines += ["", "notes"]
        lines += [f"  {finding.level}: {finding}" for finding in plan.findings]
        lines += [f"  {note}" for note in plan.notes]
    return "\n".join(lines) + "\n"


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
    parts.append(f"Source: {rule.source}")
    return "\n\n".join(parts)


def _scope(scope: str) -> str:
    return "" if scope == "ray" else f"   [{scope} only]"
