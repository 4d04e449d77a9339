"""How long the steps and saves of a run take, from its driver's events.

Standard library only. Knows the kinds of events, not who writes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.run.events import FieldValue, Kind, read_events


@dataclass(slots=True)
class Pace:
    """The longest step and the longest save so far; None while there was none.

    Attributes:
        is_loaded: the driver has loaded the model; before that it has nothing to save.
        longest_step_s: from one step's end to the next, its save included.
    """

    is_loaded: bool = False
    longest_step_s: float | None = None
    longest_save_s: float | None = None
    _step_began_s: float | None = None
    _save_began_s: float | None = None

    def note(self, event: Mapping[str, FieldValue]) -> None:
        """Take in one event; those of one node come in their order."""
        kind, time_s = event.get("kind"), event.get("time_s")
        if not isinstance(time_s, int | float):
            return
        if kind == Kind.ATTEMPT_STARTED:
            self._step_began_s = self._save_began_s = None
        elif kind == Kind.MODEL_LOADED:
            self.is_loaded = True
            self._step_began_s = time_s
        elif kind == Kind.CHECKPOINT_LOADED:
            self._step_began_s = time_s
        elif kind == Kind.PHASE and event.get("phase") == "save":
            self._save_began_s = time_s
        elif kind == Kind.CHECKPOINT_SAVED:
            self.longest_save_s = _longer(self.longest_save_s, self._save_began_s, time_s)
            self._save_began_s = None
        elif kind == Kind.STEP:
            self.longest_step_s = _longer(self.longest_step_s, self._step_began_s, time_s)
            self._step_began_s = time_s


def past_pace(events: Path) -> Pace:
    """Return the longest step and save that a run's events.jsonl tells of all its attempts; none has loaded anything now."""
    past = Pace()
    for event in read_events(events):
        past.note(event)
    return Pace(longest_step_s=past.longest_step_s, longest_save_s=past.longest_save_s)


def _longer(longest_s: float | None, began_s: float | None, ended_s: float) -> float | None:
    if began_s is None:
        return longest_s
    return max(longest_s or 0.0, ended_s - began_s)
