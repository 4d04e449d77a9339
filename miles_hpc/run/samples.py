"""samples-NODE.jsonl: what the job took on one node, second by second, as the node agent measured it.

A line is written when a figure has moved notably, so the figures of a line hold until the next one. Knows the lines, not
how the figures are read and not what was planned.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from miles_hpc.run.json_lines import append_json_line, read_json_lines

NOTABLE_BYTES = 16 << 20
NOTABLE_FRACTION = 0.01
LONGEST_SILENCE_S = 30.0
"""A line comes at least that often, so that a reader sees that the agent still samples."""

Source = Literal["cgroup", "processes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Host memory of the job on one node.

    Attributes:
        file: page cache of files, without shared memory; of processes, the largest part that one of them maps.
        shmem: shared memory and tmpfs; of processes, the largest part that one of them maps.
        locked: what cannot be swapped out; part of the others.
        source: the job's cgroup, or the sum over its processes where it has none of its own.
    """

    anon: int
    file: int
    shmem: int
    locked: int
    source: Source

    @property
    def total(self) -> int:
        """Everything that counts against the node's memory."""
        return self.anon + self.file + self.shmem

    @property
    def committed(self) -> int:
        """What the kernel cannot take back: all but the files' pages."""
        return self.anon + self.shmem


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One node at one moment.

    Attributes:
        gpu: bytes that the job holds on each GPU of the node; empty where none was asked for or NVML is not there.
        gpu_processes: [GPU index, pid, bytes] of each process of the job on a GPU.
        scratch: bytes on disk in the job's own scratch folder; None before it is made.
        scratch_free: free bytes of the file system that holds it.
    """

    time_s: float
    host: HostMemory
    gpu: tuple[int, ...] = ()
    gpu_processes: tuple[tuple[int, int, int], ...] = ()
    scratch: int | None = None
    scratch_free: int | None = None

    def is_notably_different(self, other: "Sample") -> bool:
        """Say whether any figure moved by more than 16 MiB and 1 % between `other` and this sample."""
        here, there = self._figures(), other._figures()
        return len(here) != len(there) or any(
            abs(new - old) > max(NOTABLE_BYTES, NOTABLE_FRACTION * old)
            for new, old in zip(here, there, strict=True)
        )

    def _figures(self) -> tuple[int, ...]:
        host = self.host
        return (host.anon, host.file, host.shmem, host.locked, self.scratch or 0, *self.gpu)


@dataclass(slots=True)
class SampleLog:
    """Appends the samples that say something new to one file."""

    path: Path
    _last: Sample | None = field(default=None)

    def append(self, sample: Sample, *, always: bool = False) -> bool:
        """Append `sample` if it differs from the last line, that line is old, or `always`; say whether it was written."""
        last = self._last
        if (
            not always
            and last is not None
            and sample.time_s - last.time_s < LONGEST_SILENCE_S
            and not sample.is_notably_different(last)
        ):
            return False
        append_json_line(self.path, asdict(sample))
        self._last = sample
        return True


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file, oldest first; a half-written or foreign line is left out."""
    for found in read_json_lines(path):
        raw = cast("dict[str, Any]", found)
        try:
            yield Sample(
                time_s=float(raw["time_s"]),
                host=HostMemory(**raw["host"]),
                gpu=tuple(raw["gpu"]),
                gpu_processes=tuple(tuple(entry) for entry in raw["gpu_processes"]),
                scratch=raw["scratch"],
                scratch_free=raw["scratch_free"],
            )
        except (ValueError, KeyError, TypeError):
            continue
