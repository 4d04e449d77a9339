"""Every short subprocess: an argv list, a time-out, stderr kept.

Long-lived children belong to `node.supervise`. Knows nothing of what the commands mean.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What a short command left behind; `exit_code` is None when it could not be started or ran out of time."""

    argv: tuple[str, ...]
    exit_code: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """The command ran and returned 0."""
        return self.exit_code == 0

    def describe(self) -> str:
        """Return argv, exit code and the last lines of stderr on one line, for an error message."""
        tail = " | ".join(self.stderr.strip().splitlines()[-5:])
        code = "not run" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"`{' '.join(self.argv)}`: {code}: {tail or '(no error text)'}"


def run_short(
    argv: Sequence[str], *, timeout_s: float, environ: Mapping[str, str] | None = None
) -> Completed:
    """Run `argv` to its end and return its output; never raises for what the command does.

    Args:
        argv: program and arguments; no shell is involved.
        timeout_s: seconds after which the command is killed and reported as not run.
        environ: the whole environment of the command; None passes on our own.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=dict(os.environ if environ is None else environ),
            check=False,
        )
    except FileNotFoundError:
        return Completed(
            argv=tuple(argv), exit_code=None, stdout="", stderr=f"{argv[0]} is not on PATH"
        )
    except OSError as error:
        return Completed(argv=tuple(argv), exit_code=None, stdout="", stderr=str(error))
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr.decode(errors="replace") if error.stderr else ""
        return Completed(
            argv=tuple(argv),
            exit_code=None,
            stdout="",
            stderr=f"{stderr}no answer in {timeout_s:g} s",
        )
    return Completed(
        argv=tuple(argv), exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr
    )
