"""A driver that has gone silent: noticed by the head, looked into on every node, then ended like one that failed.

    the head's silence -> rendezvous/stacks_wanted -> each agent: attempts/N/stacks/NODE.txt, stacks-NODE -> the head goes on

Decides when it is a hang; what the processes do is `stacks`.
"""

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.errors import DriverError
from miles_hpc.node.context import NodeContext
from miles_hpc.node.stacks import write_stacks
from miles_hpc.node.supervise import POLL_S
from miles_hpc.probe.stack_hook import STACK_SIGNAL
from miles_hpc.run.events import Kind
from miles_hpc.run.silence import Silence

_STACKS_WAIT_S = 60.0

log = logging.getLogger(__name__)


class HangError(DriverError):
    """The driver has written no event for longer than its phase may take."""


@dataclass(slots=True)
class HangWatch:
    """Looks at the driver's events; `look` raises when it has been silent for too long."""

    context: NodeContext
    silence: Silence
    floor_s: float
    temp: Path
    _seen: int = 0
    _since_s: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Raise HangError, with the stacks of all nodes in the attempt folder, if the driver hangs."""
        now_s = time.monotonic()
        if self.silence.num_events != self._seen:
            self._seen, self._since_s = self.silence.num_events, now_s
        limit_s = self.silence.limit_s(self.floor_s)
        silent_s = now_s - self._since_s
        if not self.silence.phase or silent_s < limit_s:
            return
        where = self.silence.where()
        log.error("no event for %.0f s in %s: collecting stacks", silent_s, where)
        self.context.events.append(
            Kind.HANG,
            phase=self.silence.phase,
            step=self.silence.step,
            silent_s=round(silent_s, 1),
            limit_s=round(limit_s, 1),
        )
        late = self._collect(where)
        told = "" if not late else f" (none of {', '.join(late)})"
        raise HangError(
            f"{self.context.node}: no event of the driver for {silent_s:.0f} s in {where}; expected one within {limit_s:.0f} s. "
            f"See where its processes stood in {self.context.attempt.stacks(self.context.node).parent}{told}; "
            "agent.hang_after is the least that is waited."
        )

    def _collect(self, reason: str) -> tuple[str, ...]:
        """Have every node write its stacks; return those that have not said so in time."""
        rendezvous = self.context.rendezvous
        with contextlib.suppress(OSError):
            rendezvous.want_stacks(reason)
        answer_stacks(self.context, self.temp)
        end_s = time.monotonic() + _STACKS_WAIT_S
        while True:
            there = rendezvous.have_stacks()
            late = tuple(node for node in self.context.identity.nodes if node not in there)
            if not late or time.monotonic() >= end_s or self.context.stop.count > 0:
                return late
            time.sleep(POLL_S)


def answer_stacks(context: NodeContext, temp: Path) -> None:
    """Write this node's stacks, once, when the head wants them; what cannot be written is said in the log."""
    if not context.rendezvous.wants_stacks() or context.node in context.rendezvous.have_stacks():
        return
    try:
        write_stacks(context, temp, _ask)
        context.rendezvous.announce_stacks(context.node)
    except OSError as error:
        log.warning("no stacks of this node: %s", error)


def _ask(pid: int) -> None:
    # The caller has just seen that the process is ours and catches the signal.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACK_SIGNAL)
