"""The head's copy of what every node reported: `attempts/N/events-*.jsonl` into the run's `events.jsonl`, while it runs.

Only whole lines are taken, each once. What they say of the driver is `run.pace`'s and `run.silence`'s; no other meaning is known here.
"""

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.run.json_lines import JsonLineTail
from miles_hpc.run.pace import Pace
from miles_hpc.run.silence import Silence


@dataclass(slots=True)
class EventMerge:
    """Appends what is new in the attempt's events files to `target`, in the order of time within one pass."""

    attempt_root: Path
    target: Path
    pace: Pace = field(default_factory=Pace)
    silence: Silence = field(default_factory=Silence)
    _tails: dict[Path, JsonLineTail] = field(default_factory=dict)

    def run_once(self) -> None:
        """Append what is new; a file that cannot be read now is read at the next pass."""
        lines: list[tuple[float, bytes]] = []
        for path in sorted(self.attempt_root.glob("events-*.jsonl")):
            with contextlib.suppress(OSError):
                lines += self._new_lines(path)
        if not lines:
            return
        lines.sort(key=lambda entry: entry[0])
        descriptor = os.open(
            self.target, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"".join(line for _, line in lines))

    def _new_lines(self, path: Path) -> list[tuple[float, bytes]]:
        found = []
        for line in self._tails.setdefault(path, JsonLineTail(path)).new_lines():
            try:
                event = json.loads(line)
                found.append((float(event["time_s"]), line))
            except (ValueError, KeyError, TypeError):
                continue
            self.pace.note(event)
            self.silence.note(event)
        return found
