"""How a fault of a spec reads: file, line, key path, what was found, what was expected, what to do.

Turns pydantic's errors into such faults. Knows no rule and reads no file.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic_core import ErrorDetails

from miles_hpc.errors import SpecError
from miles_hpc.spec.scan import KeyPath
from miles_hpc.spec.schema import describe, describe_field, entry_table, nearest_key, spec_keys

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST_VALUE: Final = 80
_MOST_SUGGESTIONS: Final = 100
_MOST_LINES: Final = 300
SECRET_VARIABLE: Final = re.compile(
    r"(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|KEY)$", re.IGNORECASE
)
"""Names of environment variables whose values are secrets by custom."""
SECRET_FLAG: Final = re.compile(
    r"(^|-)(token|secret|password|passphrase|credentials?|(api|wandb|access|private|auth|ssh)-?key)$"
)
"""Names of flags whose values are secrets by custom; `input-key` and its like name a column, so "-key" alone is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecFault:
    """One thing that is wrong with a spec.

    Attributes:
        label: the file as the user named it, or "--set".
        line: line in the file, from 1 (for "--set": which one of them); 0 when the whole file is meant.
        key: the key path as it is written in TOML; empty when no key is meant.
        fix: what to do, such as the nearest valid key; may be empty.
    """

    label: str
    line: int
    key: str
    found: str
    expected: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.label}:{self.line}" if self.line else self.label
        key = f" {self.key}:" if self.key else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{where}:{key} found {self.found}; expected {self.expected}{fix}"


def refusal(faults: Iterable[SpecFault]) -> SpecError:
    """Return the error that tells every fault, one a line, sorted by file and line."""
    ordered = sorted(set(faults), key=lambda fault: (fault.label, fault.line, fault.key))
    lines = [str(fault) for fault in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"... and {len(ordered) - _MOST_LINES} more faults")
    return SpecError("\n".join(lines))


def format_key(path: KeyPath) -> str:
    """Return `path` as it is written in TOML, with array indices in brackets."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            quoted = part if _BARE_KEY.fullmatch(part) else json.dumps(part)
            text += f".{quoted}" if text else quoted
    return text


def format_value(value: object, path: KeyPath = ()) -> str:
    """Return `value` as it is written in TOML, shortened, on one line; hidden when `path` names a secret."""
    if path and is_secret(path):
        return "a value (not shown)"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        # JSON leaves these as they are; both end a line in a terminal or a log.
        text = text.replace("\x7f", "\\u007f").replace("\x85", "\\u0085")
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    elif isinstance(value, list):
        text = "[" + ", ".join(format_value(item) for item in value[:8]) + "]"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def is_secret(path: KeyPath) -> bool:
    """Return whether `path` is an environment variable or flag whose name says that its value is a secret."""
    names = [part for part in path if isinstance(part, str)]
    if names[:1] == ["env"] and len(names) > 1:
        return SECRET_VARIABLE.search(names[1]) is not None
    if names[:3] == ["engine", "miles", "extra_args"] and len(names) > 3:
        return SECRET_FLAG.search(names[3].lower()) is not None
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFault:
    """A fault of one value before it is known where it was written; see `SpecFault`."""

    path: KeyPath
    found: str
    expected: str
    fix: str
    is_missing: bool


def explain_errors(
    errors: Sequence[ErrorDetails], values: Mapping[str, object]
) -> tuple[TypeFault, ...]:
    """Return one fault for each key that `errors`, pydantic's view of `values`, complain of."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for error in errors:
        by_path.setdefault(_real_path(error, values), []).append(error)
    return tuple(
        _explain(path, group, values, suggest=count < _MOST_SUGGESTIONS)
        for count, (path, group) in enumerate(by_path.items())
    )


def _real_path(error: ErrorDetails, values: object) -> KeyPath:
    """Return the error's place in `values`, without the names of union members that pydantic adds to it."""
    path: list[str | int] = []
    location = error["loc"]
    for index, part in enumerate(location):
        if _holds(values, part):
            values = _value_at((part,), values)
        elif error["type"] == "missing" and index == len(location) - 1:
            values = None
        else:
            continue
        path.append(part)
    return tuple(path)


def _holds(values: object, part: str | int) -> bool:
    if isinstance(values, dict):
        return part in values
    return isinstance(values, list) and isinstance(part, int) and part < len(values)


def _explain(
    path: KeyPath,
    errors: Sequence[ErrorDetails],
    values: Mapping[str, object],
    *,
    suggest: bool,
) -> TypeFault:
    kind = errors[0]["type"]
    names = tuple(part for part in path if isinstance(part, str))
    if kind == "missing":
        return _explain_missing(path, names)
    value = _value_at(path, values)
    if kind == "extra_forbidden":
        return _explain_unknown(path, names, value, suggest=suggest)
    expected = " or ".join(dict.fromkeys(_expected(error) for error in errors))
    is_name = errors[0]["loc"][-1] == "[key]"
    return TypeFault(
        path=path,
        found="this name" if is_name else format_value(value, path),
        expected=expected,
        fix=_quoting_hint(errors[0], value),
        is_missing=False,
    )


def _explain_missing(path: KeyPath, names: tuple[str, ...]) -> TypeFault:
    key = spec_keys().get(names)
    is_table = key is not None and key.table is not None
    meaning = _meaning(names)
    expected = (
        f"a table [{'.'.join(names)}]"
        if is_table
        else f"a value, since it has no default: {meaning}"
    )
    return TypeFault(path=path, found="nothing", expected=expected, fix="", is_missing=True)


def _meaning(names: tuple[str, ...]) -> str:
    """Return what the key is for: the first sentence about it; the reference page has the rest."""
    key, entry = spec_keys().get(names), entry_table(names[:-2])
    text = "" if key is None else describe(key)
    if entry is not None:
        text = describe_field(entry, names[-1])
    return text.split(". ")[0].rstrip(".")


def _explain_unknown(
    path: KeyPath, names: tuple[str, ...], value: object, *, suggest: bool
) -> TypeFault:
    parent = ".".join(names[:-1])
    nearest = nearest_key(names) if suggest else None
    valid = [key[-1] for key in spec_keys() if key[:-1] == names[:-1]]
    if (entry := entry_table(names[:-2])) is not None:
        nearest, valid = None, list(entry.model_fields)
    return TypeFault(
        path=path,
        found=f"an unknown {'table' if isinstance(value, dict) else 'key'}",
        expected=f"a key of [{parent}]" if parent else "a table of the job spec",
        fix=f'nearest valid key "{".".join(nearest)}"'
        if nearest
        else f"valid here: {', '.join(valid)}",
        is_missing=False,
    )


def _value_at(path: KeyPath, values: object) -> object:
    for part in path:
        if isinstance(values, dict) and isinstance(part, str):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
    return values


def _expected(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "literal_error":
        return str(context["expected"]).replace("'", '"')
    if error["type"] == "string_pattern_mismatch":
        return f"text of the form {context['pattern']}"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "a table"
    text = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return text[:1].lower() + text[1:]


def _quoting_hint(error: ErrorDetails, value: object) -> str:
    if error["type"] == "string_type" and isinstance(value, int | float):
        return f'write it in quotes: "{format_value(value)}"'
    if error["type"] in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "write it without quotes"
    return ""
