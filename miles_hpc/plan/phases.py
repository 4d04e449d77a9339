"""The memory plan as values: phases, what they take in each place, and the limits.

Knows the shape of a memory plan, not how it is computed (`memory`) or judged (`memory_rules`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PhaseName = Literal["load", "rollout", "handoff", "train", "weight_sync", "save"]
PHASES: tuple[PhaseName, ...] = ("load", "rollout", "handoff", "train", "weight_sync", "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What there is; None where the spec does not say."""

    host_bytes_per_node: int | None
    gpu_bytes_per_gpu: int | None
    scratch_bytes_per_node: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of a step.

    Attributes:
        parts: bytes by name; "host." and "scratch." parts count for a node, "gpu." parts for one GPU.
    """

    name: PhaseName
    host_bytes_per_node: int
    gpu_bytes_per_gpu: int
    scratch_bytes_per_node: int
    parts: Mapping[str, int]

    @property
    def committed_host_bytes(self) -> int:
        """Host memory that the kernel cannot take back: all but the page cache."""
        return self.host_bytes_per_node - self.parts.get("host.page_cache", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Memory of every phase against the limits.

    Attributes:
        phases: of the nodes and GPUs that trainer ranks are on; shared ones have the rollout engines in them too.
        alarm_host_bytes_per_node: host memory above which a second copy or the page cache has come back.
        rollout_phases: of the nodes and GPUs that rollout engines have for themselves (`rollout.own_gpus`); else empty.
    """

    limits: Limits
    phases: tuple[Phase, ...]
    alarm_host_bytes_per_node: int | None
    rollout_phases: tuple[Phase, ...] = ()

    def phase(self, name: PhaseName) -> Phase:
        """Return the phase called `name`."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def everywhere(self) -> tuple[Phase, ...]:
        """The phases of all kinds of nodes."""
        return (*self.phases, *self.rollout_phases)

    def place(self, phase: Phase) -> str:
        """Return words for where `phase` is, to follow its name: "" where all nodes are of one kind."""
        if not self.rollout_phases:
            return ""
        return " of rollout" if phase in self.rollout_phases else " of the trainer"

    @property
    def host_peaks(self) -> tuple[Phase, ...]:
        """The phase with the most host memory that cannot be taken back, of each kind of node."""
        kinds = (kind for kind in (self.phases, self.rollout_phases) if kind)
        return tuple(max(kind, key=lambda phase: phase.committed_host_bytes) for kind in kinds)

    @property
    def gpu_peaks(self) -> tuple[Phase, ...]:
        """The phase with the most GPU memory, of each kind of node."""
        kinds = (kind for kind in (self.phases, self.rollout_phases) if kind)
        return tuple(max(kind, key=lambda phase: phase.gpu_bytes_per_gpu) for kind in kinds)

    @property
    def host_peak(self) -> Phase:
        """The phase with the most host memory that cannot be taken back."""
        return max(self.host_peaks, key=lambda phase: phase.committed_host_bytes)

    @property
    def gpu_peak(self) -> Phase:
        """The phase with the most GPU memory."""
        return max(self.gpu_peaks, key=lambda phase: phase.gpu_bytes_per_gpu)


def make_phase(
    name: PhaseName, host: dict[str, int], gpu: dict[str, int], scratch: dict[str, int]
) -> Phase:
    """Return the phase of the parts that are in each place; parts of no bytes are left out."""
    places = (("host", host), ("gpu", gpu), ("scratch", scratch))
    return Phase(
        name=name,
        host_bytes_per_node=sum(host.values()),
        gpu_bytes_per_gpu=sum(gpu.values()),
        scratch_bytes_per_node=sum(scratch.values()),
        parts={
            f"{place}.{part}": count
            for place, parts in places
            for part, count in parts.items()
            if count
        },
    )
