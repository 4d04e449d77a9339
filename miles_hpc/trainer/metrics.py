"""The numbers of a step: seconds by phase, token rates, means and the time that is left. Pure arithmetic and a clock."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles_hpc.run.events import FieldValue


@dataclass(slots=True)
class PhaseClock:
    """Seconds that a step spent in each phase; a phase that is entered twice adds up."""

    seconds: dict[str, float] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.monotonic)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count the time inside the block to `phase`."""
        started = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent

    def total_s(self) -> float:
        """Return the seconds since the step began."""
        return time.monotonic() - self._started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """What a step worked on."""

    rewards: Sequence[float]
    scores: Sequence[float]
    response_lengths: Sequence[int]
    num_finished: int
    num_zero_groups: int


def step_fields(counts: StepCounts, clock: PhaseClock) -> dict[str, FieldValue]:
    """Return the fields of a STEP event that follow from counts and clock.

    `tokens_per_s` is response tokens over the whole step, `rollout_tokens_per_s` over the rollout phase alone.
    """
    num_samples = len(counts.rewards)
    num_tokens = sum(counts.response_lengths)
    total_s = clock.total_s()
    rollout_s = clock.seconds.get("rollout", 0.0)
    fields: dict[str, FieldValue] = {
        "reward": sum(counts.rewards) / num_samples,
        "score": sum(counts.scores) / num_samples,
        "num_samples": num_samples,
        "response_tokens": num_tokens,
        "finished_share": counts.num_finished / num_samples,
        "zero_groups": counts.num_zero_groups,
        "tokens_per_s": num_tokens / total_s if total_s > 0 else 0.0,
        "rollout_tokens_per_s": num_tokens / rollout_s if rollout_s > 0 else 0.0,
        "step_s": total_s,
    }
    return fields | {f"{phase}_s": seconds for phase, seconds in clock.seconds.items()}


def time_left_s(step_seconds: Sequence[float], num_left: int) -> float:
    """Return the expected time of the `num_left` steps: the median of the steps so far, times their number.

    The median, because the first step of an attempt also warms caches and a saving step also saves.
    """
    if not step_seconds:
        return 0.0
    ordered = sorted(step_seconds)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return median * num_left
