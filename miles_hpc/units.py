"""Quantities with units as a person writes them: "96GiB", "30min", and Slurm's own time forms.

Knows nothing of specs or Slurm commands. All functions raise `ValueError` with the expected forms; callers add where.
"""

import re
from typing import NewType

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)

_BYTE_FACTORS = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_BYTES_RE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*")
_SECONDS_FACTORS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_RE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|h|d)")
_SLURM_RE = re.compile(r"(?:(?P<days>[0-9]+)-)?(?P<fields>[0-9]+(?::[0-9]+){0,2})")


def parse_bytes(text: str) -> Bytes:
    """Return the bytes in `text`, a number with a unit such as "96GiB" or "1.5 TB".

    Raises:
        ValueError: if the unit is missing or unknown, or the value is not a whole number of bytes.
    """
    match = _BYTES_RE.fullmatch(text)
    if match is None or match[2] not in _BYTE_FACTORS:
        units = " ".join(_BYTE_FACTORS)
        raise ValueError(f"a size is a number and a unit ({units}), such as '96GiB'")
    return Bytes(round(float(match[1]) * _BYTE_FACTORS[match[2]]))


def format_bytes(count: int) -> str:
    """Return `count` in the largest binary unit that keeps it at 1 or more, with one decimal."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_seconds(text: str) -> Seconds:
    """Return the seconds in `text`: units ("90s", "30min", "1h30min", "2d") or any Slurm time form.

    Slurm's meaning is kept: "30" is minutes, "10:00" is minutes:seconds, "4:00:00" is hours:minutes:seconds,
    "1-12" is days-hours, "1-12:30" days-hours:minutes, "1-12:30:15" days-hours:minutes:seconds.

    Raises:
        ValueError: for any other form, and for minute or second fields above 59 next to a larger field,
            which Slurm would carry over silently.

    Source: the "--time" option of the sbatch manual.
    """
    compact = text.replace(" ", "")
    parts = _DURATION_RE.findall(compact)
    if parts and "".join(f"{number}{unit}" for number, unit in parts) == compact:
        units = [unit for _, unit in parts]
        order = ["d", "h", "min", "s", "ms"]
        if units != sorted(set(units), key=order.index):
            raise ValueError("a duration names each unit once, largest first, such as '1h30min'")
        return Seconds(sum(float(number) * _SECONDS_FACTORS[unit] for number, unit in parts))
    return _parse_slurm_time(text.strip())


def _parse_slurm_time(text: str) -> Seconds:
    match = _SLURM_RE.fullmatch(text)
    if match is None:
        raise ValueError(
            "a duration is '90s', '30min', '4h', '2d', '1h30min' or a Slurm time: "
            "'minutes', 'minutes:seconds', 'hours:minutes:seconds', 'days-hours[:minutes[:seconds]]'"
        )
    fields = [int(field) for field in match["fields"].split(":")]
    if match["days"] is not None:
        days, (hours, minutes, seconds) = int(match["days"]), (*fields, 0, 0)[:3]
        if hours > 23:
            raise ValueError(
                f"{hours} hours after a day count; write days-hours with hours below 24"
            )
    else:
        days = 0
        hours, minutes, seconds = {
            1: (0, fields[0], 0),
            2: (0, fields[0], fields[-1]),
            3: (fields[0], fields[1 % len(fields)], fields[-1]),
        }[len(fields)]
    if seconds > 59 or (minutes > 59 and (hours or days or len(fields) == 3)):
        raise ValueError("minutes and seconds next to a larger field must be below 60")
    return Seconds(float(((days * 24 + hours) * 60 + minutes) * 60 + seconds))


def format_slurm_time(seconds: float) -> str:
    """Return `seconds` as Slurm's unambiguous days-hours:minutes:seconds, rounded up to a whole second."""
    total = -int(-seconds // 1)
    days, rest = divmod(total, 86400)
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"


def format_duration(seconds: float) -> str:
    """Return `seconds` for a person, in the two largest units: "45s", "3min 20s", "2h 5min", "1d 4h"."""
    total = max(0, round(seconds))
    units = [("d", 86400), ("h", 3600), ("min", 60), ("s", 1)]
    first = next((index for index, (_, size) in enumerate(units) if total >= size), 3)
    parts: list[str] = []
    for unit, size in units[first : first + 2]:
        count, total = divmod(total, size)
        if count or not parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts)
