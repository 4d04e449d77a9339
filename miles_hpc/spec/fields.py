"""The field types shared by every table of the spec: quantities with units, paths, and text that travels to Slurm.

Quantities are written as strings in TOML and dumped as strings again, so that a dumped spec validates to the same spec.
This module knows no table and no file; `spec.load` makes paths absolute before they are validated.
"""

import ipaddress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

from miles_hpc.units import Bytes, Seconds, parse_bytes, parse_seconds

LONGEST_TIME_S = 366 * 86400.0
"""Slurm counts a limit in minutes in 32 bits; a year is far below that and above any real limit."""
_A_YEAR = "a duration of at most a year (366 days)"
NO_LIMIT_WORDS = frozenset({"unlimited", "infinite", "infinity", "none", "-1", "partition_limit"})


@dataclass(frozen=True, slots=True)
class PathBase:
    """Marks a path field with what a relative path is relative to; `spec.load` resolves it.

    Attributes:
        base: "current" folder at submission, the folder of the "file" that sets the key, or "node": a path on the
            compute nodes, which must be absolute.
    """

    base: Literal["current", "file", "node"]


@dataclass(frozen=True, slots=True)
class Words:
    """What the reference page calls a type."""

    words: str


def _as_noun(error: ValueError) -> str:
    """Return the message "a size is such and such" so that it can follow "expected"."""
    return str(error).replace(" is ", ": ", 1)


def _size(value: object) -> Bytes:
    if not isinstance(value, str):
        raise ValueError("a text with a unit, such as '96GiB'; a bare number has none")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(_as_noun(error)) from error
    except OverflowError as error:
        raise ValueError("a size that fits on a machine, such as '96GiB'") from error


def _duration(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(
            "a text with a unit or a Slurm time, such as '30min' or '04:00:00'; "
            "a bare number would be minutes to Slurm and seconds to most other tools"
        )
    try:
        seconds = parse_seconds(value)
        if seconds > LONGEST_TIME_S:
            raise OverflowError
        # Microseconds, so that the dumped text below reads back as the same number.
        return Seconds(round(float(seconds), 6))
    except ValueError as error:
        raise ValueError(_as_noun(error)) from error
    except OverflowError as error:
        raise ValueError(_A_YEAR) from error


def _time_limit(value: object) -> object:
    if isinstance(value, str) and value.strip().lower() in NO_LIMIT_WORDS:
        raise ValueError(
            "a finite time limit, such as '4h'; Slurm reads this word as no limit at all"
        )
    return value


def _finite_limit(seconds: Seconds) -> Seconds:
    if seconds <= 0:
        raise ValueError(
            "a time limit above zero, such as '4h'; Slurm reads a limit of 0 as no limit at all"
        )
    return seconds


def _above_zero(seconds: Seconds) -> Seconds:
    if seconds <= 0:
        raise ValueError("a duration above zero")
    return seconds


def _is_control(character: str) -> bool:
    # C0, DEL, C1 and the line separators: all of them can end a line of a script, a log or a terminal.
    code = ord(character)
    return code < 0x20 or 0x7F <= code < 0xA0 or code in (0x2028, 0x2029)


def has_control_characters(text: str) -> bool:
    """Return whether `text` holds a character that ends a line or steers a terminal."""
    return any(_is_control(character) for character in text)


def _line(value: str) -> str:
    if has_control_characters(value):
        raise ValueError("one line of text without control characters")
    return value


def distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return `values`, or raise ValueError if one of them stands there twice."""
    if len(set(values)) != len(values):
        raise ValueError("an array without duplicates")
    return values


def ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return `values`, or raise ValueError unless each is above the one before it."""
    if any(left >= right for left, right in pairwise(values)):
        raise ValueError("an ascending array without duplicates")
    return values


def _not_zero(size: Bytes) -> Bytes:
    if size <= 0:
        raise ValueError("a size above zero; to Slurm, a memory of 0 means all of the node's")
    return size


def _text(value: str) -> str:
    if has_control_characters(value.replace("\n", "").replace("\t", "")):
        raise ValueError("text without control characters other than line breaks and tabs")
    return value


def _interface(value: str) -> str:
    if "/" in value:
        try:
            ipaddress.IPv4Network(value, strict=False)
        except ValueError as error:
            raise ValueError("an IPv4 subnet, such as '10.1.0.0/16'") from error
    return value


def _path(value: object) -> object:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("a path; an empty one would mean the current folder")
        _line(value)
    return value


def _node_path(value: object) -> object:
    if isinstance(value, str) and value.strip() and not value.startswith("/"):
        raise ValueError(
            "an absolute path on the compute nodes; the nodes share no current folder, and no variable is expanded"
        )
    return _path(value)


_DURATION_TEXT = PlainSerializer(lambda seconds: f"{seconds:.6f}s", return_type=str)
_DURATION_SCHEMA = WithJsonSchema(
    {"type": "string", "examples": ["30min", "04:00:00", "1-12:00:00"]}
)

Size = Annotated[
    Bytes,
    BeforeValidator(_size),
    PlainSerializer(lambda count: f"{count}B", return_type=str),
    WithJsonSchema({"type": "string", "examples": ["96GiB", "512MiB"]}),
    Words("size"),
]
"""A size with a unit: "96GiB", "512MiB", "1.5TB"."""
PositiveSize = Annotated[Size, AfterValidator(_not_zero), Words("size above 0")]
"""A size above zero."""
Duration = Annotated[
    Seconds,
    BeforeValidator(_duration),
    _DURATION_TEXT,
    _DURATION_SCHEMA,
    Words("duration"),
]
"""A duration with a unit ("90s", "30min", "1h30min", "2d") or any Slurm time form."""
Deadline = Annotated[
    Seconds,
    BeforeValidator(_duration),
    AfterValidator(_above_zero),
    _DURATION_TEXT,
    _DURATION_SCHEMA,
    Words("duration above 0"),
]
"""A duration above zero."""
TimeLimit = Annotated[
    Seconds,
    BeforeValidator(_duration),
    BeforeValidator(_time_limit),
    AfterValidator(_finite_limit),
    _DURATION_TEXT,
    _DURATION_SCHEMA,
    Words("time limit"),
]
"""A time limit for Slurm: above zero and finite, since Slurm reads 0 and UNLIMITED as no limit."""

Line = Annotated[str, AfterValidator(_line), Words("text")]
"""Text on one line."""
FilledLine = Annotated[str, Field(min_length=1), AfterValidator(_line), Words("text")]
"""Text on one line that says something."""
Text = Annotated[str, AfterValidator(_text), Words("text (lines)")]
"""Text that may hold line breaks and tabs."""
SlurmName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.][A-Za-z0-9_.+@:,/=-]{0,254}$"), Words("name")
]
"""A name, or a comma list of names, as Slurm takes it."""
SlurmExpression = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.+@:,/=*&|!()\[\]-]{1,1024}$"), Words("expression")
]
"""A node feature expression."""
VariableName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}$"), Words("variable name")
]
"""The name of an environment variable."""
OptionName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,63}$"), Words("option name")]
"""A long option without its dashes."""

SrunOption = Annotated[
    str, Field(pattern=r"^--[a-z][a-z0-9-]*(=.*)?$"), AfterValidator(_line), Words("option")
]
"""One long srun option with its value."""
Interface = Annotated[
    str,
    Field(
        pattern=r"^(\^?=?[A-Za-z0-9_.:@-]+(,[A-Za-z0-9_.:@-]+)*|[0-9.]+/[0-9]+)$", max_length=255
    ),
    AfterValidator(_interface),
    Words("interface"),
]
"""A network interface, a pattern in NCCL's form, or an IPv4 subnet."""
Adapter = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:,^=@-]{1,255}$"), Words("adapter")]
"""A network adapter, or a pattern in NCCL's form."""
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}$"), Words("name")]
"""A name without blanks or slashes."""

SubmitPath = Annotated[Path, BeforeValidator(_path), PathBase("current"), Words("path")]
"""A path relative to the current folder at submission."""
FilePath = Annotated[Path, BeforeValidator(_path), PathBase("file"), Words("path")]
"""A path relative to the file that sets it."""
NodePath = Annotated[
    Path, BeforeValidator(_node_path), PathBase("node"), Words("path on the nodes")
]
"""An absolute path on the compute nodes."""


class Table(BaseModel):
    """One TOML table: frozen, unknown keys refused, every field documented by the string literal under it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
