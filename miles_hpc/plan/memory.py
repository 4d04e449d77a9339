"""Memory by phase: what is awake when, on a GPU, on a node's host memory and on its scratch disk, against the limits.

Pure arithmetic over `sides`, for trainer and rollout engines that share every GPU; engines with GPUs of their own are
`separate`. What is refused is `memory_rules`. docs/memory.md has the formulas in one place with their checks.
"""

from miles_hpc.plan.phases import PHASES, Limits, MemoryPlan, PhaseName, make_phase
from miles_hpc.plan.separate import rollout_phases, trainer_phases
from miles_hpc.plan.sides import (
    CPU_NODE_BYTES,
    CPU_RANK_BYTES,
    GPU_RUNTIME_BYTES,
    OBJECT_STORE_BYTES,
    RESIDUAL_BYTES_PER_RANK,
    RESIDUAL_WEIGHT_FRACTION,
    EngineTraits,
    Sides,
    engine_file_bytes,
    make_sides,
    pinned_parts,
    saved_bytes,
    scratch_parts,
    staging_bytes,
    trainer_file_bytes,
)
from miles_hpc.spec.job import JobSpec

ALARM_FRACTION = 0.78
"""Part of a node's memory above which a job is in danger: the published 750 of 956 GB (qwen3-8.md section 6)."""


def plan_memory(spec: JobSpec, traits: EngineTraits) -> MemoryPlan:
    """Return the memory of every phase, for a spec whose layout is sound."""
    sides, limits = make_sides(spec, traits), _limits(spec)
    host = limits.host_bytes_per_node
    alarm = None if host is None else round(ALARM_FRACTION * host)
    if spec.rollout.own_gpus is not None:
        return MemoryPlan(
            limits=limits,
            phases=trainer_phases(sides, host),
            rollout_phases=rollout_phases(sides, host),
            alarm_host_bytes_per_node=alarm,
        )
    on_gpu = spec.cluster.device == "gpu"
    phases = []
    for name in PHASES:
        device = _device_parts(sides, name)
        parts = _host_parts(sides, name) if on_gpu else _cpu_host_parts(sides, device)
        if name == "load" or not spec.offload.drop_page_cache:
            parts["page_cache"] = _page_cache(sides, host, sum(parts.values()))
        phases.append(make_phase(name, parts, device if on_gpu else {}, scratch_parts(sides)))
    return MemoryPlan(limits=limits, phases=tuple(phases), alarm_host_bytes_per_node=alarm)


def _limits(spec: JobSpec) -> Limits:
    cluster, offload = spec.cluster, spec.offload
    given = [size for size in (cluster.node_memory, cluster.memory_per_node) if size is not None]
    on_disk = offload.train == "disk" or offload.stream_optimizer
    return Limits(
        host_bytes_per_node=min(given, default=None),
        gpu_bytes_per_gpu=cluster.gpu_memory if cluster.device == "gpu" else None,
        scratch_bytes_per_node=offload.scratch_min_free if on_disk else None,
    )


def _device_parts(sides: Sides, name: PhaseName) -> dict[str, int]:
    """Return what is on one GPU (on CPU: in the memory of one rank's two processes)."""
    spec = sides.spec
    trainer, asleep = sides.trainer_awake(), sides.trainer_asleep()
    engine_rest = sides.engine_asleep()
    if name == "rollout":
        parts = {**asleep, **sides.engine_awake()}
    elif name == "train":
        parts = {**trainer, **sides.working_set(), **engine_rest}
    elif name == "save":
        parts = {**trainer, **engine_rest}
    elif name == "weight_sync":
        on_gpu = spec.cluster.device == "gpu"
        buffer = {"update_buffer": sides.traits.update_buffer} if on_gpu else {}
        parts = {**asleep, "engine_weights": sides.engine.weights, **engine_rest, **buffer}
    elif name == "handoff" and spec.offload.peak_device == "gpu":
        parts = {**trainer, "engine_weights": sides.engine.weights, **engine_rest}
    elif spec.cluster.device == "cpu":  # load and handoff, where both sides are in the same memory
        parts = {**trainer, "engine_weights": sides.engine.weights}
    else:  # load, and a handoff whose peak is in host memory: one side at a time
        awake = {**asleep, **sides.engine_awake()}
        other = {**trainer, **engine_rest}
        parts = max(awake, other, key=lambda side: sum(side.values()))
    return parts if spec.cluster.device == "cpu" else {**parts, "runtime": GPU_RUNTIME_BYTES}


def _host_parts(sides: Sides, name: PhaseName) -> dict[str, int]:
    """Return what a GPU node holds in host memory."""
    spec, ranks = sides.spec, sides.ranks
    parts = {
        "object_store": OBJECT_STORE_BYTES["gpu"],
        "residual": _residual(ranks, sides.most_weights),
        **pinned_parts(sides),
    }
    trainer = {"trainer_backup": ranks * sides.paused} if spec.offload.train == "host" else {}
    keeps = sides.traits.keeps_engine_copy and spec.offload.rollout == "host"
    engine = {"engine_backup": ranks * sides.engine.weights} if keeps else {}
    if name in ("rollout", "weight_sync"):
        return {**parts, **trainer}
    if name == "save":
        return {**parts, **engine, "checkpoint_staging": ranks * saved_bytes(sides)}
    if name == "train":
        return {**parts, **engine}
    if spec.offload.peak_device == "gpu":
        larger = trainer if sum(trainer.values()) >= sum(engine.values()) else engine
        return {**parts, **larger}
    return {**parts, **trainer, **engine}


def _residual(ranks: int, weights: int) -> int:
    """Return what hosts were seen to hold beyond the copies; the object store was among it and is its own part here."""
    seen = ranks * (RESIDUAL_BYTES_PER_RANK + RESIDUAL_WEIGHT_FRACTION * weights)
    return max(0, round(seen) - OBJECT_STORE_BYTES["gpu"])


def _cpu_host_parts(sides: Sides, device: dict[str, int]) -> dict[str, int]:
    """Return what a CPU node holds: what would be on its GPUs, and the processes themselves.

    A transformers engine keeps its weights in the same memory awake or asleep, and a trainer that is not offloaded to disk
    stays where it is.
    """
    held = {**device, "engine_weights": sides.engine.weights}
    if sides.spec.offload.train != "disk":
        held |= sides.trainer_awake()
    parts = {part: sides.ranks * count for part, count in held.items()}
    parts["processes"] = sides.ranks * CPU_RANK_BYTES + CPU_NODE_BYTES
    parts["object_store"] = OBJECT_STORE_BYTES["cpu"]
    parts["staging"] = staging_bytes(sides)
    return parts


def _page_cache(sides: Sides, room: int | None, others: int) -> int:
    """Return what the checkpoint files leave in the page cache: their size, or the room that is left.

    Where both sides read one checkpoint it is there once.
    """
    model = sides.spec.model
    two = model.megatron_checkpoint is not None or model.rollout_checkpoint is not None
    files = engine_file_bytes(sides) + (trainer_file_bytes(sides) if two else 0)
    return files if room is None else max(0, min(files, room - others))
