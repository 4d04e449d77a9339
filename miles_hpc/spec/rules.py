"""The rules a spec must keep, each with an id, and the checks of those that need the spec alone.

`Rule` is shared with `plan.rules`, which adds the rules that need a layout. A check works on the values as written, so
that it can speak beside type faults; it does not know files, lines or flags.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule, as `miles-hpc explain ID` prints it.

    Attributes:
        id: "MH" and three digits; 1xx are rules of the spec alone, 2xx and above belong to `plan`.
        title: what is demanded, in a few words.
        reason: why, so that a reader can judge an exception.
        arithmetic: the formula, where there is one.
        source: where the fact comes from.
    """

    id: str
    title: str
    reason: str
    source: str
    arithmetic: str = ""
