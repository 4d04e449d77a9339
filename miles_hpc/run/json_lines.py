"""Files of one JSON object a line, which several processes of one node append to and others read meanwhile.

Knows no schema.
"""

import json
import os
from collections.abc import Iterator, Mapping
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
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
