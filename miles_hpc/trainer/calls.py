"""Calls to groups of actors: every result is awaited with a deadline, and whoever failed or is late is named.

Knows Ray's errors, not what the actors compute.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from miles_hpc.errors import DriverError, MilesHpcError

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_KILL_DEADLINE_S = 30.0
_COLLECT_S = 2.0
"""After a first failure, time given to the others to fail too: with collectives the first report is often not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One actor with the name that errors and events give it."""

    name: str
    node: str
    handle: Any

    def __str__(self) -> str:
        return f"{self.name} on node {self.node}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Actors of one `Host` class, called together; methods are those of the hosted objects."""

    members: tuple[Member, ...]

    def end(self) -> None:
        """End every member at once, whatever it is doing; returns when they are gone, so that their memory is free."""
        for member in self.members:
            ray.kill(member.handle)
        pings = [member.handle.__ray_ready__.remote() for member in self.members]
        ray.wait(pings, num_returns=len(pings), timeout=_KILL_DEADLINE_S)

    def call(self, method: str, *args: object, deadline_s: float) -> list[Any]:
        """Call `method` of every member with the same arguments; return the results in the members' order."""
        return self.call_each(method, [args] * len(self.members), deadline_s=deadline_s)

    def call_each(
        self,
        method: str,
        arguments: Sequence[tuple[object, ...]],
        *,
        deadline_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Call `method` of every member with its own arguments; what `look` raises meanwhile abandons the results.

        Raises:
            DriverError: if a member dies, raises or does not answer before the deadline.
        """
        references = [
            member.handle.call.remote(method, *args)
            for member, args in zip(self.members, arguments, strict=True)
        ]
        return await_results(method, self.members, references, deadline_s=deadline_s, look=look)


def await_results(
    what: str,
    members: Sequence[Member],
    references: Sequence[Any],
    *,
    deadline_s: float,
    look: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Return the values of `references`, one for each member, in order; `look` is called every second until then.

    Raises:
        DriverError: if a member dies, raises or does not answer before the deadline; all failures seen are named.
    """
    owner = dict(zip(references, members, strict=True))
    ends = time.monotonic() + deadline_s
    pending = list(references)
    results: dict[Any, Any] = {}
    failures: list[str] = []
    while pending:
        look()
        left_s = max(0.0, ends - time.monotonic())
        ready, pending = ray.wait(pending, timeout=min(left_s, _LOOK_S))
        if not ready and left_s <= _LOOK_S:
            break
        for reference in ready:
            try:
                results[reference] = ray.get(reference)
            except RayError as error:
                failures.append(_describe(owner[reference], error))
                ends = min(ends, time.monotonic() + _COLLECT_S)
    if failures:
        raise DriverError(f"driver, {what}: {'; '.join(failures)}")
    if pending:
        late = ", ".join(str(owner[reference]) for reference in pending)
        raise DriverError(
            f"driver, {what}: found no answer from {late} within {deadline_s:g} s; expected one. "
            "See the node's log and its ray-NODE folder in the attempt; raise the deadline if the work is only slow."
        )
    return [results[reference] for reference in references]


def _describe(member: Member, error: RayError) -> str:
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, MilesHpcError):
            return f"{member}: {cause}"
        _log.error("%s raised:\n%s", member, error)
        return (
            f"{member}: found {type(cause).__name__}: {cause}; expected it to return. "
            "The traceback stands above in driver.log"
        )
    if isinstance(error, RayActorError):
        _log.error("%s died:\n%s", member, error)
        reason = " ".join(str(error).split())
        kind = "its process died" if isinstance(error, ActorDiedError) else "it became unreachable"
        return (
            f"{member}: found that {kind} ({reason}); expected it to live. "
            "Look for the out-of-memory killer and at the node's log"
        )
    return f"{member}: found {type(error).__name__}: {error}; expected a result. See the node's log"
