"""plan.json: the truth at submission, as frozen values and as one JSON object.

Knows the shape of a plan, not how its parts are computed (`layout`, `environ`, `rules`) or written (`launch.bundle`).
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from miles_hpc.plan.findings import Finding
from miles_hpc.plan.phases import MemoryPlan

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The Megatron grid: world_size = tp * pp * cp * dp = etp * ep * pp * edp.

    `gpus_per_node` is 0 on CPU, where `ranks_per_node` counts trainer processes.
    """

    world_size: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    dp: int
    edp: int
    num_nodes: int
    gpus_per_node: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLayout:
    """The rollout engines; an engine of more GPUs than a node has spans `nodes_per_engine` whole nodes."""

    num_engines: int
    gpus_per_engine: int
    nodes_per_engine: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """One environment variable of the job with its reason and where the fact comes from.

    Attributes:
        scope: "ray" reaches Ray's daemons and so every worker; "driver" the driver alone.
    """

    name: str
    value: str
    why: str
    source: str
    scope: Literal["ray", "driver"] = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run, every value resolved but those only a node can know.

    Attributes:
        memory: memory of every phase against the limits.
        driver_argv: the driver's command; `{run_dir}`, `{attempt_dir}`, `{scratch_dir}`, `{head_address}` and
            `{num_nodes}` are filled on the head node.
        overrides: the `--set` arguments, as given.
        spec: the whole spec as JSON values; `JobSpec.model_validate_json` of its dump gives the spec back.
        hashes: SHA-256 of each file in spec/, by name.
        notes: what a user should know before submitting, one sentence each.
        findings: what the rules say; a plan that was submitted has warnings at most.
    """

    name: str
    engine: Literal["native", "miles"]
    layout: Layout
    rollout: RolloutLayout
    memory: MemoryPlan
    environment: tuple[EnvVar, ...]
    driver_argv: tuple[str, ...]
    overrides: tuple[str, ...]
    spec: dict[str, object]
    hashes: dict[str, str]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    package_version: str
    version: int = VERSION

    def to_json(self) -> str:
        """Return the file's text; equal plans are equal bytes."""
        return json.dumps(asdict(self), indent=2) + "\n"
