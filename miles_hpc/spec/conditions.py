"""Conditions on the values of a spec, each with the words that a message says it in.

Knows no rule and no table.
"""

from collections.abc import Callable
from dataclasses import dataclass

from miles_hpc.spec.faults import format_value
from miles_hpc.spec.rules import Settings


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that holds or not for a spec.

    Attributes:
        keys: the keys that decide.
        words: the condition, so that "with ..." or "which ... demands" can be said.
    """

    keys: tuple[str, ...]
    words: str
    holds: Callable[[Settings], bool]


def equals(key: str, *values: str) -> Condition:
    """Return: `key` is one of `values`."""
    words = f"{key} = {' or '.join(format_value(value) for value in values)}"
    return Condition((key,), words, lambda settings: settings.value(key) in values)


def other_than(key: str, *texts: str) -> Condition:
    """Return: `key` is not one of `texts`, each a value as it is written in TOML."""
    return Condition(
        (key,),
        f"{key} other than {texts[0]}",
        lambda settings: format_value(settings.value(key)) not in texts,
    )


def above_one(key: str) -> Condition:
    """Return: the number `key` is above 1."""

    def is_above(settings: Settings) -> bool:
        value = settings.value(key)
        return isinstance(value, int) and value > 1

    return Condition((key,), f"{key} above 1", is_above)


def written(*keys: str) -> Condition:
    """Return: one of `keys` is written."""
    return Condition(
        keys,
        " or ".join(keys),
        lambda settings: any(settings.written(key) is not None for key in keys),
    )


def is_on(key: str) -> Condition:
    """Return: the switch `key` is true."""
    return Condition((key,), f"{key} = true", lambda settings: settings.value(key) is True)


def any_of(*conditions: Condition) -> Condition:
    """Return: one of `conditions` holds."""
    return Condition(
        tuple(key for condition in conditions for key in condition.keys),
        " or ".join(condition.words for condition in conditions),
        lambda settings: any(condition.holds(settings) for condition in conditions),
    )


def all_of(*conditions: Condition) -> Condition:
    """Return: all of `conditions` hold."""
    return Condition(
        tuple(key for condition in conditions for key in condition.keys),
        " and ".join(condition.words for condition in conditions),
        lambda settings: all(condition.holds(settings) for condition in conditions),
    )
