"""The head's part in a stop that saves first: it asks in time before the limit, passes a request on, and waits for the answer.

    alarm of any node, `cancel --save` -> save_and_stop.json -> this watch -> the engine's trigger file -> the driver

Decides when the driver is asked and when it had its time; what the attempt then comes to is `verdict`. Knows no signal: a
library in the driver could swallow it.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.errors import MilesHpcError
from miles_hpc.node.context import NodeContext
from miles_hpc.node.environment import fill_placeholders
from miles_hpc.run.events import Kind
from miles_hpc.run.pace import Pace, past_pace
from miles_hpc.run.resume import latest_checkpoint, read_object, write_whole
from miles_hpc.run.save_request import (
    DRIVER_EXIT_CODE,
    SaveRequest,
    ask_to_save,
    read_save_request,
    save_grace_s,
)
from miles_hpc.slurm import job_end_s

TEARDOWN_S = 30.0
"""Part of the time limit kept for the end: driver, Ray on all nodes, logs, verdict; the waits in `teardown` are below it."""
_LEAST_LEAD_S = 120.0
_LEAST_LEAD_SHARE = 0.1

log = logging.getLogger(__name__)


class StoppedOnRequestError(MilesHpcError):
    """The driver was asked to save and stop, and has done so or had its time."""

    def __init__(self, request: SaveRequest, ending: str, *, has_progress: bool) -> None:
        super().__init__(f"{request.reason}; {ending}")
        self.request = request
        self.has_progress = has_progress
        """The attempt has made the newest checkpoint itself."""


@dataclass(slots=True)
class SaveWatch:
    """Looks for a request and for its answer; `look` raises when the attempt is to end.

    Attributes:
        end_s: when the time limit ends the job, in seconds since the epoch; None when nobody says.
    """

    context: NodeContext
    pace: Pace
    end_s: float | None
    _is_asked: bool = False
    _due_s: float = 0.0
    _grace_s: float = 0.0
    _trigger: Path | None = field(default=None)

    def look(self, driver_code: int | None) -> None:
        """Pass a new request on; raise StoppedOnRequestError once the one that stands is answered or overdue."""
        if driver_code is None:
            self._ask_before_limit()
        request = read_save_request(self.context.attempt, self.context.rendezvous.attempt_key)
        if request is None:
            return
        if not self._is_asked:
            self._is_asked = True
            try:
                self._pass_on(request)
            except OSError as error:
                raise self._ended(request, f"the driver could not be asked: {error}") from error
        # What follows is the newest request's: `cancel --save` may have replaced the clock's.
        if driver_code is None and not self.pace.is_loaded:
            raise self._ended(request, "no model was loaded, so there was nothing to save")
        if driver_code == DRIVER_EXIT_CODE or self._is_removed():
            raise self._ended(request, "the driver saved and stopped")
        if driver_code is None and time.monotonic() >= self._due_s:
            raise self._ended(
                request,
                f"the driver was asked to save and has not done so within {self._grace_s:.0f} s",
            )

    def lead_s(self) -> float:
        """Return how long before the time limit the driver is asked."""
        handoff = self.context.handoff
        share_s = _LEAST_LEAD_SHARE * (handoff.time_limit_s or float("inf"))
        unmeasured_s = min(_LEAST_LEAD_S, share_s)
        asked_for_s = handoff.save_before_limit_s
        floor_s = unmeasured_s if asked_for_s is None else asked_for_s
        step_s, save_s = self.pace.longest_step_s, self.pace.longest_save_s
        if step_s is None:
            return max(floor_s, TEARDOWN_S)
        return max(floor_s, step_s + (unmeasured_s if save_s is None else save_s) + TEARDOWN_S)

    def _ask_before_limit(self) -> None:
        if self._is_asked or self.end_s is None:
            return
        left_s, lead_s = self.end_s - time.time(), self.lead_s()
        if left_s > lead_s:
            return
        reason = f"job.time_limit ends in {max(0.0, left_s):.0f} s (asked {lead_s:.0f} s before)"
        key = self.context.rendezvous.attempt_key
        try:
            ask_to_save(self.context.attempt, key, "time_limit", reason)
        except OSError as error:
            unwritten = SaveRequest(
                attempt=key, cause="time_limit", reason=reason, asked_s=time.time()
            )
            raise self._ended(unwritten, f"the driver could not be asked: {error}") from error

    def _pass_on(self, request: SaveRequest) -> None:
        self._grace_s = save_grace_s(self.pace, self.context.handoff.save_grace_s)
        if self.end_s is not None:
            room_s = self.end_s - time.time() - 0.5 * TEARDOWN_S
            self._grace_s = max(0.0, min(self._grace_s, room_s))
        self._due_s = time.monotonic() + self._grace_s
        trigger = self.context.handoff.save_trigger
        log.warning("asking the driver to save and stop: %s", request.reason)
        self.context.events.append(
            Kind.SAVE_REQUESTED,
            cause=request.cause,
            reason=request.reason,
            grace_s=round(self._grace_s, 1),
        )
        if trigger is None:
            self._due_s = time.monotonic()
            return
        values = {
            "run_dir": str(self.context.run.root),
            "attempt_dir": str(self.context.attempt.root),
        }
        path = Path(fill_placeholders((trigger.path,), values)[0])
        if path != self.context.attempt.save_request:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, request.reason + "\n")
        if trigger.done == "removed":
            self._trigger = path

    def _is_removed(self) -> bool:
        return self._trigger is not None and not self._trigger.exists()

    def _is_of_this_attempt(self, checkpoint: Path) -> bool:
        """Compare two times of the run folder's own file system, so no node's clock matters."""
        try:
            made = (checkpoint / "COMPLETE").stat().st_mtime_ns
            return made > self.context.attempt.identity.stat().st_mtime_ns
        except OSError:
            return False

    def _ended(self, request: SaveRequest, how: str) -> StoppedOnRequestError:
        newest = latest_checkpoint(self.context.run)
        gained = newest is not None and self._is_of_this_attempt(newest)
        if newest is None:
            kept = "there is no complete checkpoint"
        elif gained:
            kept = f"a further attempt continues from {newest.name}"
        else:
            kept = f"the last complete checkpoint is still {newest.name}"
        return StoppedOnRequestError(request, f"{how}; {kept}", has_progress=gained)


def watch_saves(context: NodeContext, pace: Pace) -> SaveWatch:
    """Return the watch of this head, which is about to start or has just started its driver."""
    end_s = _end_of_job(context)
    if end_s is None and context.handoff.time_limit_s is not None:
        context.events.append(
            Kind.WARNING,
            message="nothing says when the time limit ends this job; the driver is not asked to save before it",
        )
    # Not the steps: before this attempt has done one, there is nothing new that an early request could save.
    pace.longest_save_s = pace.longest_save_s or past_pace(context.run.events).longest_save_s
    return SaveWatch(context=context, pace=pace, end_s=end_s)


def _end_of_job(context: NodeContext) -> float | None:
    """Return when the time limit ends this job, in seconds since the epoch.

    Slurm says it. The local controller counts from submission, which job.json tells once it is written.
    """
    if context.identity.cluster == "slurm":
        return job_end_s(context.identity.job_id, os.environ)
    limit_s = context.handoff.time_limit_s
    submitted_s = (read_object(context.run.job) or {}).get("submitted_s")
    if limit_s is None or not isinstance(submitted_s, int | float):
        return None
    return submitted_s + limit_s
