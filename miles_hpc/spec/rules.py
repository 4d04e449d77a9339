"""What a rule of the spec is, and what a check sees of a spec.

`Rule` is shared with `plan`, which adds the rules that need a layout; the spec's own are in `spec.effect_rules` and
`spec.variable_rules`. A check works on the values as written, so that it can speak beside type faults; it knows neither
files nor lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from miles_hpc.spec.faults import format_value
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
        fixed: what it guards cannot work at all, so that [rules] of a spec cannot change its level.
    """

    id: str
    title: str
    reason: str
    source: str
    arithmetic: str = ""
    fixed: bool = False

    @property
    def has_fixed_level(self) -> bool:
        """[rules] cannot change the level: the rule is `fixed`, or of the spec alone, without which there is no plan."""
        return self.fixed or self.id.startswith("MH1")


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
    """The values as written, with the defaults of keys that were left out.

    Attributes:
        overridden: key paths that `--set` wrote.
        local: the job is for the local cluster.
    """

    def __init__(
        self, values: Mapping[str, object], *, overridden: frozenset[KeyPath], local: bool
    ) -> None:
        self._values = values
        self.overridden = overridden
        self.local = local

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

    def is_decided(self, key: str) -> bool:
        """Return whether `key` has a value, and one of its choices when it has a closed set of them."""
        field = spec_keys()[tuple(key.split("."))]
        choices = (
            get_args(field.field.annotation)
            if get_origin(field.field.annotation) is Literal
            else ()
        )
        value = self.value(key)
        return value in choices if choices else value is not None or not field.required

    def table(self, key: str) -> Mapping[str, object]:
        """Return the table written at the dotted `key`; empty when there is none or it is no table."""
        written = self.written(key)
        return written if isinstance(written, Mapping) else {}

    def shown(self, key: str) -> str:
        """Return "key = value" as it would stand in TOML, for a message."""
        value = self.value(key)
        return f"no {key}" if value is None else f"{key} = {format_value(value)}"
