"""The driver's view of a request to save and stop, raised at the borders of the loop's phases.

Knows where the request is, not what is saved.
"""

from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import ResumeError
from miles_hpc.paths import AttemptDir
from miles_hpc.run.resume import read_identity
from miles_hpc.run.save_request import SaveRequest, read_save_request


class StopAskedError(Exception):
    """What the step has done so far is abandoned; raised only where the trainer's state is that of a whole step."""


@dataclass(frozen=True, slots=True)
class StopRequests:
    """The requests to one attempt's driver."""

    attempt: AttemptDir
    key: str

    def asked(self) -> SaveRequest | None:
        """Return the request that stands, or None."""
        return read_save_request(self.attempt, self.key)

    def raise_if_asked(self) -> None:
        """Raise StopAskedError if the driver is to save and stop."""
        if self.asked() is not None:
            raise StopAskedError


def read_stop_requests(attempt_dir: Path) -> StopRequests:
    """Return the requests of the attempt in `attempt_dir`.

    Raises:
        ResumeError: if the folder does not say whose attempt it is.
    """
    attempt = AttemptDir(attempt_dir)
    identity = read_identity(attempt)
    if identity is None:
        raise ResumeError(
            f"{attempt.identity}: found no whole file; expected whose attempt this is, as the head's agent writes it. "
            "Start the driver through `python -m miles_hpc.node RUN_DIR`, not by hand."
        )
    return StopRequests(attempt, identity.key)
