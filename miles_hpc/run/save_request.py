"""The request that a run's driver saves and stops: `attempts/N/requests/save_and_stop.json`.

Made by a node's memory alarm, by the head's clock before the time limit or by `cancel --save`; answered by the head's
agent, which passes it on to the driver. Standard library only. Knows nothing of how a driver saves.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Literal

from miles_hpc.paths import AttemptDir
from miles_hpc.run.pace import Pace
from miles_hpc.run.resume import read_object, write_whole

DRIVER_EXIT_CODE = 75
"""What a driver returns that saved and stopped on request: EX_TEMPFAIL of sysexits.h, to be tried again later."""

SaveCause = Literal["memory_alarm", "time_limit", "cancel"]
_CAUSES = ("memory_alarm", "time_limit", "cancel")
_LEAST_GRACE_S = 60.0
# A first save of a large model to a shared file system takes minutes, and nothing was measured that says how many.
_UNMEASURED_GRACE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """save_and_stop.json.

    Attributes:
        attempt: key of the execution (job id and restart count) that is meant; another one's is no request.
        cause: who asks; it decides how the attempt ends.
        reason: one line for a person.
    """

    attempt: str
    cause: SaveCause
    reason: str
    asked_s: float


def ask_to_save(
    attempt: AttemptDir, key: str, cause: SaveCause, reason: str, *, replace: bool = False
) -> None:
    """Leave the request in `attempt`, whole; raises OSError.

    The first one stands, unless a later one is to `replace` it: a cancelled job must not be requeued.
    """
    request = SaveRequest(attempt=key, cause=cause, reason=reason, asked_s=time.time())
    path = attempt.save_request
    path.parent.mkdir(exist_ok=True)
    whole = path.with_name(f".{path.name}.{cause}.{os.getpid()}")
    write_whole(whole, json.dumps(asdict(request)) + "\n")
    if replace:
        whole.replace(path)
        return
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(whole)
    whole.unlink()


def read_save_request(attempt: AttemptDir, key: str) -> SaveRequest | None:
    """Return what `attempt` was asked, or None while it was not, or when another execution is meant."""
    raw = read_object(attempt.save_request)
    if raw is None or raw.get("attempt") != key or raw.get("cause") not in _CAUSES:
        return None
    try:
        return SaveRequest(**raw)  # type: ignore[arg-type]
    except TypeError:
        return None


def save_grace_s(pace: Pace, asked_for_s: float | None) -> float:
    """Return how long a driver that was asked may take: what the spec says, or twice what its steps and saves took."""
    if asked_for_s is not None:
        return asked_for_s
    if pace.longest_step_s is None:
        return _UNMEASURED_GRACE_S
    return max(_LEAST_GRACE_S, 2 * (pace.longest_step_s + (pace.longest_save_s or 0.0)))
