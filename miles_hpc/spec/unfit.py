"""Values of a TOML file that JSON cannot carry or no field of a spec wants.

Knows no table of the spec.
"""

import datetime
import math
from collections.abc import Callable

from miles_hpc.spec.scan import KeyPath


def _is_unicode(text: str) -> bool:
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


_UNFIT: tuple[tuple[str, Callable[[object], bool]], ...] = (
    ("a date or time", lambda value: isinstance(value, datetime.date | datetime.time)),
    (
        "a number that is not finite",
        lambda value: isinstance(value, float) and not math.isfinite(value),
    ),
    (
        "a whole number of more than 64 bits",
        lambda value: isinstance(value, int) and abs(value) >= 2**63,
    ),
    (
        "a text with a NUL or half a character",
        lambda value: isinstance(value, str) and not _is_unicode(value),
    ),
)


def unfit_values(value: object, path: KeyPath) -> list[tuple[KeyPath, str]]:
    """Return the place of each such value below `path`, and what it is."""
    if isinstance(value, dict):
        found = [item for key, child in value.items() for item in unfit_values(child, (*path, key))]
        return found + [((*path, key), "a NUL in a name") for key in value if not _is_unicode(key)]
    if isinstance(value, list):
        return [
            item
            for index, child in enumerate(value)
            for item in unfit_values(child, (*path, index))
        ]
    return [(path, name) for name, is_unfit in _UNFIT if is_unfit(value)]
