"""Files of one JSON object a line, which several processes of one node append to and others read meanwhile.

Knows no schema.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


def append_json_line(path: Path, fields: Mapping[str, object]) -> None:
    """Append one object by a single write, so that lines never mix; raises OSError when the file cannot be written."""
    line = json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_json_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects of a file, oldest first; a half-written or foreign line is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    yield from _objects(lines)


@dataclass(slots=True)
class JsonLineTail:
    """What has been appended to a file since the last look."""

    path: Path
    _offset: int = 0

    def new_lines(self) -> list[bytes]:
        """Return the whole lines that are new; raises OSError when the file cannot be read."""
        if self.path.stat().st_size <= self._offset:
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines(keepends=True)

    def new(self) -> Iterator[dict[str, object]]:
        """Yield the new objects, oldest first; a foreign line is left out, and so is a file that is not there yet."""
        try:
            lines = self.new_lines()
        except FileNotFoundError:
            return
        yield from _objects(lines)


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, object]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
