"""Text for a terminal: a run's status for a person, and text from elsewhere that may not move the cursor.

Standard library only, since the command line needs it before anything else. Prints nothing itself.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_hpc.run.report import Status


def printable(text: str) -> str:
    """Return `text` with what would steer a terminal, as in a hostile name, written out."""
    return "".join(
        character if character == "\n" or character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def status_text(now: "Status") -> str:
    """Return a status with one fact a line; what is not known has none."""
    facts = (
        ("run", now.run_dir),
        ("job", now.job_id),
        ("state", now.state),
        ("attempt", now.attempt or None),
        ("exit code", now.exit_code),
        ("driver exit code", now.driver_exit_code),
        ("cause", None if now.cause in (None, "none") else now.cause),
        ("evidence", now.evidence or None),
        ("reason", now.reason or None),
    )
    known = ((name, str(value)) for name, value in facts if value is not None)
    return "\n".join(f"{name:<17}{printable(value)}" for name, value in known)
