"""The rules a spec must keep, each with an id, and the checks of those that need the spec alone.

`Rule` is shared with `plan.rules`, which adds the rules that need a layout. A check works on the values as written, so
that it can speak beside type faults; it does not know files, lines or flags.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from miles_hpc.spec.scan import KeyPath
from miles_hpc.spec.schema import spec_keys


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that the values break, before it is known where they were written.

    Attributes:
        inert: the key is only without effect; a site profile may hold it.
    """

    rule: Rule
    path: tuple[str, ...]
    found: str
    expected: str
    fix: str = ""
    inert: bool = False


class Settings:
    """The values as written, with the defaults of keys that were left out."""

    def __init__(self, values: Mapping[str, object], from_command_line: frozenset[KeyPath]) -> None:
        self._values = values
        self.from_command_line = from_command_line

    def written(self, key: str) -> object:
        """Return the value written for the dotted `key`, or None."""
        value: object = self._values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def value(self, key: str) -> object:
        """Return the value written for the dotted `key`, or its default."""
        written = self.written(key)
        return spec_keys()[tuple(key.split("."))].default if written is None else written


def check_rules(settings: Settings, *, local: bool) -> list[Violation]:
    """Return everything that the spec's own rules find."""
    return []
