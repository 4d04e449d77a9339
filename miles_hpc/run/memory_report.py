"""`report`: the memory that was planned against what the nodes measured, by phase.

Each second of a node belongs to the phase that the driver had begun last by then. Reads plan.json, the samples and the head's
events as data; works for a running job and for one that has left no sample. Knows no scheduler.
"""

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.events import FieldValue, Kind, read_events
from miles_hpc.run.report import head_events
from miles_hpc.run.resume import read_object, read_verdict
from miles_hpc.run.samples import Sample, read_samples

START = "start"
"""The time before the driver begins its first phase."""
# A phase at least that long has a sample in it, written or not; what held before may stand for it.
_SAMPLED_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What plan.json says of one phase."""

    host_bytes_per_node: int
    page_cache_bytes: int
    gpu_bytes_per_gpu: int
    scratch_bytes_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The peaks of one node in one phase; each figure has its own moment.

    Attributes:
        host_bytes: anon, file and shared memory together; the four parts after it are of that moment.
        gpu_bytes_per_gpu: of the fullest GPU.
        num_lines: lines of the samples file that fell into the phase; 0 when what held before is all there is.
    """

    node: str
    source: str
    host_bytes: int
    anon_bytes: int
    file_bytes: int
    shmem_bytes: int
    locked_bytes: int
    gpu_bytes_per_gpu: int | None
    scratch_bytes: int | None
    num_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """One phase.

    Attributes:
        planned: None for a phase that the plan does not know.
        measured: the peaks of every node.
        planned_rollout: of the nodes that rollout engines have for themselves, where there are such.
    """

    name: str
    planned: Planned | None
    measured: tuple[Measured, ...]
    planned_rollout: Planned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Planned against measured, of the newest attempt; `attempt` is 0 before the first.

    Attributes:
        cause / evidence: why that attempt ended; None while it has not.
    """

    run_dir: str
    attempt: int
    limits: Mapping[str, int | None]
    alarm_host_bytes_per_node: int | None
    phases: tuple[PhaseReport, ...]
    alarms: tuple[Mapping[str, FieldValue], ...]
    cause: str | None = None
    evidence: str | None = None

    @property
    def has_samples(self) -> bool:
        """Say whether any node has measured anything."""
        return any(phase.measured for phase in self.phases)

    def to_json(self) -> str:
        """Return the object that `report --json` prints."""
        return json.dumps(asdict(self))


def report_memory(run: RunDir) -> MemoryReport:
    """Return what was planned and what has been measured so far."""
    memory = _object(read_object(run.plan) or {}, "memory")
    planned, rollout = (
        {str(raw["name"]): _planned(raw) for raw in _objects(memory.get(kind))}
        for kind in ("phases", "rollout_phases")
    )
    attempts = tuple(run.attempts())
    attempt = attempts[-1] if attempts else None
    measured = {} if attempt is None else _measured(attempt)
    names = [START, *planned, *(name for name in measured if name not in planned)]
    phases = tuple(
        PhaseReport(
            name=name,
            planned=planned.get(name),
            measured=tuple(measured.get(name, ())),
            planned_rollout=rollout.get(name),
        )
        for name in dict.fromkeys(names)
        if name in planned or name in measured
    )
    alarm = _whole((read_object(run.handoff) or {}).get("memory_alarm"), "host_bytes")
    limits = _object(memory, "limits")
    verdict = None if attempt is None else read_verdict(attempt)
    return MemoryReport(
        run_dir=str(run.root),
        attempt=0 if attempt is None else attempt.number,
        limits={name: _whole(limits, name) for name in limits},
        alarm_host_bytes_per_node=alarm or _whole(memory, "alarm_host_bytes_per_node"),
        phases=phases,
        alarms=() if attempt is None else tuple(_alarms(attempt)),
        cause=None if verdict is None else verdict.cause,
        evidence=None if verdict is None else verdict.evidence,
    )


def _measured(attempt: AttemptDir) -> dict[str, list[Measured]]:
    """Return the peaks of every node by phase."""
    marks = tuple(_phase_marks(attempt))
    found: dict[str, list[Measured]] = {}
    for path in sorted(attempt.root.glob("samples-*.jsonl")):
        node = path.name.removeprefix("samples-").removesuffix(".jsonl")
        for phase, inside in _by_phase(tuple(read_samples(path)), marks).items():
            found.setdefault(phase, []).append(_peaks(node, inside))
    return found


def _phase_marks(attempt: AttemptDir) -> Iterator[tuple[float, str]]:
    """Yield when the driver began each phase, and its name."""
    for event in read_events(head_events(attempt)):
        time_s = event.get("time_s")
        if event["kind"] == Kind.PHASE and isinstance(time_s, int | float):
            yield float(time_s), str(event.get("phase", ""))


def _by_phase(
    samples: Sequence[Sample], marks: Sequence[tuple[float, str]]
) -> dict[str, list[tuple[Sample, bool]]]:
    """Return the samples of each phase, and whether each was taken in it; one that only held on from before was not."""
    starts = [time_s for time_s, _ in marks]
    found: dict[str, list[tuple[Sample, bool]]] = {}
    for index, sample in enumerate(samples):
        # Until the next line; the last line holds for itself alone, since sampling may have ended there.
        end_s = samples[index + 1].time_s if index + 1 < len(samples) else sample.time_s
        first = bisect.bisect_right(starts, sample.time_s)
        name = marks[first - 1][1] if first else START
        found.setdefault(name, []).append((sample, True))
        for later in range(first, len(marks)):
            begin_s = starts[later]
            if begin_s >= end_s:
                break
            until_s = min(end_s, starts[later + 1] if later + 1 < len(marks) else end_s)
            if until_s - begin_s >= _SAMPLED_S:
                found.setdefault(marks[later][1], []).append((sample, False))
    return found


def _peaks(node: str, inside: Sequence[tuple[Sample, bool]]) -> Measured:
    samples = [sample for sample, _ in inside]
    top = max((sample.host for sample in samples), key=lambda host: host.total)
    gpu = [max(sample.gpu) for sample in samples if sample.gpu]
    scratch = [sample.scratch for sample in samples if sample.scratch is not None]
    return Measured(
        node=node,
        source=top.source,
        host_bytes=top.total,
        anon_bytes=top.anon,
        file_bytes=top.file,
        shmem_bytes=top.shmem,
        locked_bytes=top.locked,
        gpu_bytes_per_gpu=max(gpu, default=None),
        scratch_bytes=max(scratch, default=None),
        num_lines=sum(taken for _, taken in inside),
    )


def _alarms(attempt: AttemptDir) -> Iterator[Mapping[str, FieldValue]]:
    events = [
        event
        for path in sorted(attempt.root.glob("events-*.jsonl"))
        for event in _alarm_events(path)
    ]
    yield from sorted(events, key=lambda event: str(event.get("time_s")))


def _alarm_events(path: Path) -> Iterator[Mapping[str, FieldValue]]:
    return (event for event in read_events(path) if event["kind"] == Kind.MEMORY_ALARM)


def _planned(raw: Mapping[str, object]) -> Planned:
    return Planned(
        host_bytes_per_node=_whole(raw, "host_bytes_per_node") or 0,
        page_cache_bytes=_whole(raw.get("parts"), "host.page_cache") or 0,
        gpu_bytes_per_gpu=_whole(raw, "gpu_bytes_per_gpu") or 0,
        scratch_bytes_per_node=_whole(raw, "scratch_bytes_per_node") or 0,
    )


def _object(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, dict) and "name" in entry]


def _whole(raw: object, name: str) -> int | None:
    value = raw.get(name) if isinstance(raw, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
