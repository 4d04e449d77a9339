"""How long the driver may be silent: as long as its phases have taken so far allows, and never less than a floor.

Standard library only. Knows the kinds of events, not who writes them or what follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.run.events import FieldValue, Kind, read_events

_TIMES_LONGEST = 3.0
_OF_THE_DRIVER = frozenset(
    {
        Kind.PHASE, Kind.STEP, Kind.OFFLOAD, Kind.ONLOAD, Kind.WEIGHT_SYNC, Kind.NCCL_PROOF, Kind.MODEL_LOADED,
        Kind.CHECKPOINT_SAVED, Kind.CHECKPOINT_LOADED, Kind.STOPPED_ON_REQUEST,
    }
)  # fmt: skip


@dataclass(slots=True)
class Silence:
    """The driver's phase, how many events it has written, and the longest that each phase has taken.

    Attributes:
        phase: the phase that began last; empty before the first. A driver that tells no phase is never judged.
        step: its step; None where the driver does not say.
        num_events: grows with every event of the driver, on whatever node it was written.
    """

    phase: str = ""
    step: int | None = None
    num_events: int = 0
    _longest_s: dict[str, float] = field(default_factory=dict)
    _began_s: float | None = None

    def note(self, event: Mapping[str, FieldValue]) -> None:
        """Take in one event; phases and steps come in their order."""
        kind, time_s = event.get("kind"), event.get("time_s")
        if not isinstance(time_s, int | float):
            return
        if kind == Kind.ATTEMPT_STARTED:
            self.phase, self.step, self._began_s = "", None, None
        if kind not in _OF_THE_DRIVER:
            return
        self.num_events += 1
        if kind not in (Kind.PHASE, Kind.STEP):
            return
        if self._began_s is not None:
            took_s = time_s - self._began_s
            self._longest_s[self.phase] = max(self._longest_s.get(self.phase, 0.0), took_s)
        self._began_s = time_s if kind == Kind.PHASE else None
        if kind == Kind.PHASE:
            step = event.get("step")
            self.phase = str(event.get("phase", ""))
            self.step = step if isinstance(step, int) else None

    def learn(self, events: Path) -> None:
        """Take over how long the phases of earlier attempts took, from the run's events.jsonl."""
        past = Silence()
        for event in read_events(events):
            past.note(event)
        self._longest_s = {**past._longest_s, **self._longest_s}

    def limit_s(self, floor_s: float) -> float:
        """Return how long the driver may write no event in its phase."""
        return max(floor_s, _TIMES_LONGEST * self._longest_s.get(self.phase, 0.0))

    def where(self) -> str:
        """Name the phase and the step."""
        return f"phase {self.phase}" + ("" if self.step is None else f" of step {self.step}")
