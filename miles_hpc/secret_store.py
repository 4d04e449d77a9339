"""Secrets on their way from a person to the driver: files of mode 0600 that their owner alone can read.

Two sources: a file of `NAME=value` lines that the user keeps, and, for secrets of the submitter's environment, a file of
our own in `$XDG_STATE_HOME/miles-hpc/secrets` (0700), outside every run folder. Standard library only, since the login node
writes what the head node reads. A value never stands in an error message. Knows no spec.
"""

import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_hpc.errors import Fault
from miles_hpc.handoff import SecretSource

_HIDDEN = "[secret]"
# Shorter values are words of ordinary text: hiding them would spoil every log and protect nothing.
_SHORTEST_HIDDEN = 4
_LONGEST_FILE_BYTES = 1 << 20


def state_folder(environ: Mapping[str, str]) -> Path:
    """Return this user's folder for the secrets of jobs that have not ended."""
    root = environ.get("XDG_STATE_HOME", "")
    base = Path(root) if root.startswith("/") else Path.home() / ".local" / "state"
    return base / "miles-hpc" / "secrets"


def store_secrets(values: Mapping[str, str], folder: Path, run_dir: Path) -> Path:
    """Write the secrets of the run in `run_dir` to a new file in `folder`, which is made private, and return its path.

    Raises:
        OSError: if the folder is another user's or cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is no folder of this user")
    folder.chmod(0o700)
    path = folder / f"{secrets.token_hex(16)}.json"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        # Bytes that are no UTF-8 are half characters here; JSON's escapes carry them.
        json.dump({"run_dir": str(run_dir), "values": dict(values)}, file)
        file.flush()
        os.fsync(descriptor)
    return path


def read_secrets(source: SecretSource, where: str) -> tuple[dict[str, str], tuple[Fault, ...]]:
    """Return the values of `source` by name, or the faults that keep them from being used.

    Args:
        source: the names and the file.
        where: what the faults are about, such as "node: secrets".
    """
    path = Path(source.path)
    again = (
        "Submit again from a shell that has them, or name a file in [secrets]."
        if source.is_stored
        else "Write it on a file system that the head node sees, and `chmod 600` it."
    )

    def fault(found: str, expected: str, fix: str) -> tuple[dict[str, str], tuple[Fault, ...]]:
        return {}, (Fault(where=where, found=found, expected=expected, fix=fix),)

    private = "a file of mode 0600 owned by this user"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return fault(f"{path}: {error.strerror}", private, again)
    with os.fdopen(descriptor, "rb") as file:
        # Of the open file, not of the name: what was judged is what is read.
        status = os.fstat(descriptor)
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        if not stat.S_ISREG(status.st_mode):
            return fault(f"{path}, which is no plain file", private, again)
        if status.st_uid != os.getuid():
            return fault(f"{path} of user id {status.st_uid}", private, again)
        if status.st_mode & 0o077:
            fix = (
                f"Run `chmod 600` on it, and replace the secrets: others could read them ({mode})."
            )
            return fault(f"{path} of mode {mode}", private, fix)
        if status.st_size > _LONGEST_FILE_BYTES:
            return fault(f"{path} of {status.st_size} bytes", "at most 1 MiB of text", again)
        text = os.fsdecode(file.read())
    values = json.loads(text)["values"] if source.is_stored else parse_lines(text)
    missing = [name for name in source.names if name not in values]
    if missing:
        expected = "a line NAME=value for each name in secrets.names"
        return fault(f"no {', '.join(missing)} in {path}", expected, "Add them, or shorten names.")
    return {name: values[name] for name in source.names}, ()


def parse_lines(text: str) -> dict[str, str]:
    """Return the values of `NAME=value` lines; the value is the rest of the line as it stands, quotes included.

    Empty lines, lines that start with # and a leading "export " are allowed; nothing is evaluated.
    """
    values = {}
    for line in text.split("\n"):
        name, equals, value = line.removesuffix("\r").partition("=")
        name = name.strip().removeprefix("export ").strip()
        if equals and not name.startswith("#"):
            values[name] = value
    return values


class Redaction:
    """Takes the values it was told out of text that this package writes."""

    def __init__(self) -> None:
        self._values: tuple[str, ...] = ()

    def add(self, values: Sequence[str]) -> None:
        """Hide `values`, and each of their lines, from now on."""
        parts = {part for value in values for part in (value, *value.splitlines())}
        known = {*self._values, *(part for part in parts if len(part) >= _SHORTEST_HIDDEN)}
        # The longest first: a value may hold another.
        self._values = tuple(sorted(known, key=len, reverse=True))

    def clean(self, text: str) -> str:
        """Return `text` without the values."""
        for value in self._values:
            text = text.replace(value, _HIDDEN)
        return text
