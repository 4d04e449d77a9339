"""The field types shared by every table of the spec: sizes and durations written with units.

Both are written as strings in TOML and dumped as strings again, so that a dumped spec validates to the same spec.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema

from miles_hpc.units import Bytes, Seconds, parse_bytes, parse_seconds


def _size(value: object) -> Bytes:
    if not isinstance(value, str):
        raise ValueError("a size is a string with a unit, such as '96GiB'")
    return parse_bytes(value)


def _duration(value: object) -> Seconds:
    if not isinstance(value, str):
        raise ValueError(
            "a duration is a string with a unit or a Slurm time, such as '30min' or '04:00:00'"
        )
    return parse_seconds(value)


Size = Annotated[
    Bytes,
    BeforeValidator(_size),
    PlainSerializer(lambda count: f"{count}B", return_type=str),
    WithJsonSchema({"type": "string", "examples": ["96GiB", "512MiB"]}),
]
Duration = Annotated[
    Seconds,
    BeforeValidator(_duration),
    PlainSerializer(lambda seconds: f"{seconds:.3f}s", return_type=str),
    WithJsonSchema({"type": "string", "examples": ["30min", "04:00:00", "1-12:00:00"]}),
]


class Table(BaseModel):
    """One TOML table: frozen, unknown keys refused, every field documented by the string literal under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
