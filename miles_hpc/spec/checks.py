"""All rules of the spec alone, in one place: their registry and the check of a spec against them.

Knows no layout and no engine flag; the rules above them are `plan.rules` and those of the engines.
"""

from miles_hpc.spec.effect_rules import EFFECT_RULES
from miles_hpc.spec.effects import check_effects
from miles_hpc.spec.rules import Rule, Settings, Violation
from miles_hpc.spec.variable_rules import VARIABLE_RULES, check_variables

SPEC_RULES: tuple[Rule, ...] = (*EFFECT_RULES, *VARIABLE_RULES)


def check_rules(settings: Settings) -> tuple[Violation, ...]:
    """Return everything that the spec's own rules find, one for each key and rule."""
    found: dict[tuple[str, tuple[str, ...]], Violation] = {}
    for violation in (*check_effects(settings), *check_variables(settings)):
        found.setdefault((violation.rule.id, violation.path), violation)
    return tuple(found.values())
