"""Reads the TOML files of a spec, what they extend, site profiles and `--set`: values, and where each was written.

Knows TOML, files and layers; knows no table of the spec but the top-level key `extends`. Reader: `spec.load`.
"""

import datetime
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import tomli

from miles_hpc.paths import packaged
from miles_hpc.spec.faults import SpecFault, format_value
from miles_hpc.spec.scan import KeyPath, scan_lines, split_key

LARGEST_FILE_BYTES: Final = 256 * 1024
DEEPEST_NESTING: Final = 16
RECIPE_PREFIX: Final = "recipe:"
Kind = Literal["site", "file", "override"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The values of one file or one `--set`, which later layers overlay.

    Attributes:
        label: the file as the user named it, or "--set".
        folder: what relative paths in it are relative to.
        lines: line of each key; for an override its ordinal.
    """

    label: str
    kind: Kind
    folder: Path
    values: dict[str, object]
    lines: Mapping[KeyPath, int]


@dataclass(slots=True)
class Sources:
    """What has been read so far, and what was wrong with it.

    Attributes:
        files: bytes of each file by a name that is unique in the run folder's spec/.
        complete: every file could be read, so that a missing key is really missing.
    """

    layers: list[Layer] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    faults: list[SpecFault] = field(default_factory=list)
    complete: bool = True
    names: dict[Path, str] = field(default_factory=dict)

    def unreadable(self, fault: SpecFault) -> None:
        """Note a fault that hides the rest of its file."""
        self.faults.append(fault)
        self.complete = False


def read_chain(sources: Sources, path: Path, kind: Kind, chain: Sequence[Path] = ()) -> None:
    """Append the layers of `path`: first what it extends, in order, then itself.

    Args:
        sources: where layers, bytes and faults are collected.
        path: the file.
        kind: what its layers are, for precedence and for what they may hold.
        chain: the files that led here by `extends`, the outermost first.
    """
    content = _read_bytes(sources, path)
    if content is None:
        return
    document = _parse(sources, _label(path), content)
    if document is None:
        return
    values, lines = document
    _keep(sources, path, kind, content)
    line = lines.get(("extends",), 1)
    for base in _extended(sources, _label(path), values.pop("extends", []), line):
        _read_base(sources, (path.parent / base), kind, (*chain, path), line)
    sources.layers.append(
        Layer(
            label=_label(path),
            kind=kind,
            folder=path.parent.absolute(),
            values=values,
            lines=lines,
        )
    )


def _read_base(
    sources: Sources, base: Path, kind: Kind, chain: tuple[Path, ...], line: int
) -> None:
    real = os.path.realpath(base)
    if real in {os.path.realpath(path) for path in chain}:
        sources.unreadable(
            SpecFault(
                label=_label(chain[-1]),
                line=line,
                key="extends",
                found="a cycle: " + " -> ".join(_label(path) for path in (*chain, base)),
                expected="files that end in one that extends nothing",
            )
        )
        return
    if not os.path.exists(base):  # noqa: PTH110 - Path.exists raises on a name too long or a folder not ours
        sources.unreadable(
            SpecFault(
                label=_label(chain[-1]),
                line=line,
                key="extends",
                found=f"no file {format_value(str(base))}",
                expected='a TOML file, relative to the folder of this one, or a recipe as "recipe:NAME"',
            )
        )
        return
    read_chain(sources, base, kind, chain)


def _extended(sources: Sources, label: str, value: object, line: int) -> list[Path]:
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and all(_is_file_name(name) for name in names):
        return [_base_path(name) for name in names]
    sources.faults.append(
        SpecFault(
            label=label,
            line=line,
            key="extends",
            found=format_value(value),
            expected="a file name or an array of file names",
        )
    )
    return []


def _base_path(name: str) -> Path:
    """Return the file that `name` extends: a path, or a recipe of the package by its name."""
    if name.startswith(RECIPE_PREFIX):
        return packaged("jobs") / f"{name.removeprefix(RECIPE_PREFIX)}.toml"
    return Path(os.path.expanduser(name))  # noqa: PTH111 - never raises


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name.strip() != "" and "\0" not in name


def _read_bytes(sources: Sources, path: Path) -> bytes | None:
    expected = f"a TOML file of at most {LARGEST_FILE_BYTES // 1024} KiB"
    try:
        status = path.stat()
        # A pipe would block, a device would never end.
        if not stat.S_ISREG(status.st_mode):
            found = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        elif status.st_size > LARGEST_FILE_BYTES:
            found = f"{status.st_size} bytes"
        else:
            return path.read_bytes()
    except FileNotFoundError:
        found = "no such file"
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
    sources.unreadable(
        SpecFault(label=_label(path), line=0, key="", found=found, expected=expected)
    )
    return None


def _label(path: Path) -> str:
    """Return the path as the user named it, quoted when it could break a line."""
    return format_value(str(path)) if not str(path).isprintable() else str(path)


def _parse(
    sources: Sources, label: str, content: bytes
) -> tuple[dict[str, object], dict[KeyPath, int]] | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"the byte 0x{content[error.start]:02x}"
        sources.unreadable(
            SpecFault(label=label, line=line, key="", found=found, expected="UTF-8 text")
        )
        return None
    try:
        values: dict[str, object] = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        sources.unreadable(_syntax_fault(label, text, error))
        return None
    except (RecursionError, ValueError) as error:
        sources.unreadable(
            SpecFault(
                label=label,
                line=1,
                key="",
                found=str(error),
                expected="TOML of a spec's simplicity",
            )
        )
        return None
    if _is_deeper_than(values, DEEPEST_NESTING):
        found = f"tables or arrays nested more than {DEEPEST_NESTING} deep"
        sources.unreadable(
            SpecFault(label=label, line=1, key="", found=found, expected="at most four levels")
        )
        return None
    # tomli reads CRLF as LF; so must the positions.
    return values, scan_lines(text.replace("\r\n", "\n"))


def _syntax_fault(label: str, text: str, error: tomli.TOMLDecodeError) -> SpecFault:
    if text.startswith("\ufeff"):
        found, fix = "a byte order mark", "save the file as UTF-8 without one"
    else:
        found, fix = f"malformed TOML ({error.msg}, column {error.colno})", ""
    return SpecFault(
        label=label, line=error.lineno, key="", found=found, expected="TOML 1.0", fix=fix
    )


def _is_deeper_than(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


def _keep(sources: Sources, path: Path, kind: Kind, content: bytes) -> None:
    """Keep the file's bytes under its own name, or a numbered one when another file has that name."""
    real = path.resolve()
    if real in sources.names:
        return
    stem = f"site-{path.stem}" if kind == "site" else path.stem
    name = f"{stem}{path.suffix}"
    number = 2
    while name in sources.files:
        name = f"{stem}-{number}{path.suffix}"
        number += 1
    sources.names[real] = name
    sources.files[name] = content


def read_overrides(sources: Sources, overrides: Sequence[str]) -> None:
    """Append one layer for each "key.path=value"; a later one wins over an earlier.

    The value is TOML; a word that is not TOML, and a date or time, is a string: `--set job.time_limit=04:00:00`.
    """
    for ordinal, text in enumerate(overrides, start=1):
        parsed = _parse_override(sources, text, ordinal)
        if parsed is None:
            continue
        path, value = parsed
        values: dict[str, object] = {path[-1]: value}
        for part in reversed(path[:-1]):
            values = {part: values}
        sources.layers.append(
            Layer(
                label="--set",
                kind="override",
                folder=Path.cwd(),
                values=values,
                lines={path[:length]: ordinal for length in range(1, len(path) + 1)},
            )
        )


def _parse_override(
    sources: Sources, text: str, ordinal: int
) -> tuple[tuple[str, ...], object] | None:
    split = split_key(text) if text.isprintable() else None
    if split is None or not split[1] or len(split[0]) > DEEPEST_NESTING:
        # The text may hold a secret, so only what stands before the equals sign is shown.
        sources.faults.append(
            SpecFault(
                label="--set",
                line=ordinal,
                key="",
                found=format_value(text.split("=", 1)[0]),
                expected='key.path=value on one line, such as train.num_steps=8 (an empty text is "")',
            )
        )
        return None
    path, raw = split
    try:
        document = tomli.loads(f"value = {raw}")
    except (ValueError, RecursionError) as error:
        if raw[0] not in "\"'[{":
            return path, raw
        sources.faults.append(
            SpecFault(
                label="--set",
                line=ordinal,
                key=".".join(path),
                found=f"a malformed TOML value ({error})",
                expected="a TOML value or a bare word",
            )
        )
        return None
    value = document["value"]
    is_date = isinstance(value, datetime.date | datetime.time)
    has_comment = "#" in raw and not isinstance(value, str)
    if is_date or has_comment:
        return path, raw
    return path, value
