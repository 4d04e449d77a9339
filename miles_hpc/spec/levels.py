"""What a spec says about the level of one rule.

Knows the form of an id, not which rules there are; that is `engine.compose`, which sees all of them.
"""

from typing import Annotated, Literal

from pydantic import Field

from miles_hpc.spec.fields import FilledLine, Table, Words

RuleId = Annotated[str, Field(pattern=r"^MH[0-9]{3}$"), Words("rule id")]
"""The id of a rule."""


class RuleLevel(Table):
    """[rules.ID]: another level for one rule, and why."""

    level: Literal["error", "warning"]
    """What the rule's findings are in this spec."""
    reason: FilledLine
    """Why, for whoever reads the plan."""
