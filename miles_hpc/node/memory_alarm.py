"""When host memory has passed the plan's alarm, and what most likely has come back.

Pure: judges samples. What is then done about it is `sampling`.
"""

from dataclasses import dataclass, field
from typing import Literal

from miles_hpc.run.samples import HostMemory
from miles_hpc.units import format_bytes

# An alarm is over, and a new one may come, below this part of it.
_REARM_FRACTION = 0.95

Cause = Literal["page_cache", "second_backup"]
_CAUSE_WORDS: dict[Cause, str] = {
    "page_cache": "the page cache came back",
    "second_backup": "a second backup of the weights is held, or something leaks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """Host memory above the limit: how much, and what grew since the model was loaded."""

    host: HostMemory
    counted: int
    limit: int
    grown_file: int
    grown_committed: int

    @property
    def cause(self) -> Cause:
        """Which of the two grew more."""
        return "page_cache" if self.grown_file > self.grown_committed else "second_backup"

    def __str__(self) -> str:
        host = self.host
        return (
            f"memory alarm: found {format_bytes(self.counted)} of host memory "
            f"(anon {format_bytes(host.anon)}, file {format_bytes(host.file)}, shared {format_bytes(host.shmem)}, "
            f"locked {format_bytes(host.locked)}); expected at most {format_bytes(self.limit)}. "
            f"Likely {_CAUSE_WORDS[self.cause]}: files grew by {format_bytes(self.grown_file)}, the rest by "
            f"{format_bytes(self.grown_committed)}"
        )


@dataclass(slots=True)
class AlarmJudge:
    """Compares samples with the alarm; one alarm each time that the limit is passed."""

    limit: int
    _base: HostMemory | None = field(default=None)
    _is_raised: bool = field(default=False)
    _was_loaded: bool = field(default=False)

    def judge(self, host: HostMemory, *, loaded: bool) -> Alarm | None:
        """Return the alarm that `host` raises, if it does.

        Until the model is loaded its files fill the page cache as planned, so only what cannot be taken back counts.
        """
        if loaded and not self._was_loaded:
            self._was_loaded, self._base = True, None
        counted = host.total if loaded else host.committed
        if counted <= self.limit:
            if self._base is None or counted < self._base.total:
                self._base = host
            if counted < _REARM_FRACTION * self.limit:
                self._is_raised = False
            return None
        if self._is_raised:
            return None
        self._is_raised = True
        base = self._base
        return Alarm(
            host=host,
            counted=counted,
            limit=self.limit,
            grown_file=max(0, host.file - (0 if base is None else base.file)) if loaded else 0,
            grown_committed=max(0, host.committed - (0 if base is None else base.committed)),
        )
