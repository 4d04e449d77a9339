"""Memory by phase: what is awake when, on a GPU, on a node's host memory and on its scratch disk, against the limits.

Pure arithmetic over `footprint`. What an engine keeps beside the formulas is told by its `EngineTraits`; what is refused
is `memory_rules`. docs/memory.md has the formulas in one place with their checks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from miles_hpc.plan.footprint import (
    ADAM_BYTES,
    DTYPE_BYTES,
    EngineFootprint,
    TrainerFootprint,
    engine_footprint,
    trainer_footprints,
)
from miles_hpc.plan.grid import ranks_per_node
from miles_hpc.plan.shape import count_params
from miles_hpc.spec.job import JobSpec

GB, GIB, MIB = 10**9, 2**30, 2**20
ALARM_FRACTION = 0.78
"""Part of a node's memory above which a job is in danger: the published 750 of 956 GB (qwen3-8.md section 6)."""
RESIDUAL_BYTES_PER_RANK = 15 * GB
RESIDUAL_WEIGHT_FRACTION = 0.45
"""What hosts were seen to hold beyond the copies counted here, for each GPU rank: 15 GB + 0.45 of its trainer weights.

Fitted to two published measurements: 226.7 GB on 8 ranks of 11.3 GB (pull request 3089, less its 70.6 GB of engine copies)
and the 600 to 650 GB of Qwen3.8 on 4 ranks of 97.5 GB (less 390 GB of trainer copies). See docs/memory.md.
"""
CPU_RANK_BYTES = 640 * MIB
"""A trainer process and an engine process on CPU without weights. Measured with `CPU_NODE_BYTES`, see docs/memory.md."""
CPU_NODE_BYTES = 640 * MIB
"""Ray's processes, the agent and, on the head node, the driver of a CPU node."""
GPU_RUNTIME_BYTES = 3 * GIB
"""CUDA contexts of both sides (1.9 GiB measured for two) and NCCL's buffers, on each GPU."""
UPDATE_BUFFER_BYTES = 512 * MIB
"""Bucket in which weights travel to the engines (Miles' default of update-weight-buffer-size)."""
DEFAULT_MEM_FRACTION = 0.85
"""What SGLang takes of a GPU when rollout.mem_fraction_static is not set; it computes about this."""
OBJECT_STORE_BYTES: Mapping[str, int] = {"cpu": 128 * MIB, "gpu": 16 * GIB}
"""Ray's object store on each node, by device; the default would be 30 % of the machine's memory."""

PhaseName = Literal["load", "rollout", "handoff", "train", "weight_sync", "save"]
PHASES: tuple[PhaseName, ...] = ("load", "rollout", "handoff", "train", "weight_sync", "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """What a training engine keeps in memory beside what every engine must.

    Attributes:
        pinned_copies: copies of a rank's trainer weights that stay pinned in host memory all the time.
        keeps_engine_copy: the sleeping rollout engine leaves its weights in host memory.
        rebuilds_weights: a waking trainer casts its weights from the optimizer's master weights, which sleep instead of them.
        paused_adapters: adapters with their optimizer state sleep too, instead of staying on the GPU.
        longest_sample_tokens: tokens of the longest sample, when longer than prompt plus response.
        staging_chunks: staging chunks of one rank for the offload to disk, and as many for streamed optimizer state.
        streamed_bytes: bytes on disk of each parameter whose optimizer state is streamed; twice the state where a step reads
            one file and writes another.
        optimizer_bucket: memory of the bucket of streamed state where the engine fixes it.
    """

    pinned_copies: int = 0
    keeps_engine_copy: bool = True
    rebuilds_weights: bool = False
    paused_adapters: bool = True
    longest_sample_tokens: int | None = None
    staging_chunks: int = 2
    streamed_bytes: int = 2 * ADAM_BYTES
    optimizer_bucket: int | None = None


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
        alarm_host_bytes_per_node: host memory above which a second copy or the page cache has come back.
    """

    limits: Limits
    phases: tuple[Phase, ...]
    alarm_host_bytes_per_node: int | None

    def phase(self, name: PhaseName) -> Phase:
        """Return the phase called `name`."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def host_peak(self) -> Phase:
        """The phase with the most host memory that cannot be taken back."""
        return max(self.phases, key=lambda phase: phase.committed_host_bytes)

    @property
    def gpu_peak(self) -> Phase:
        """The phase with the most GPU memory."""
        return max(self.phases, key=lambda phase: phase.gpu_bytes_per_gpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sides:
    """The two sides of one job, on one rank and its GPU."""

    spec: JobSpec
    traits: EngineTraits
    trainer: TrainerFootprint
    most_weights: int
    engine: EngineFootprint

    @property
    def optimizer_on_device(self) -> int:
        return 0 if self.spec.train.optimizer_cpu_offload else self.trainer.optimizer

    @property
    def paused(self) -> int:
        """Trainer bytes that go to host or disk: all weights under LoRA, the optimizer state in full training.

        In full training Miles' parameters come back from its pinned copy instead (`pinned_copies`), or from the optimizer.
        """
        if self.spec.lora is None:
            returns = self.traits.pinned_copies > 0 or self.traits.rebuilds_weights
            return self.optimizer_on_device + (0 if returns else self.most_weights)
        return self.most_weights + (self.trainer.trained if self.traits.paused_adapters else 0)

    def trainer_awake(self) -> dict[str, int]:
        return {
            "trainer_weights": self.trainer.weights,
            "adapters_and_gradients": self.trainer.trained,
            "optimizer": self.optimizer_on_device,
            **self.bucket(),
        }

    def bucket(self) -> dict[str, int]:
        """Return what streamed optimizer state keeps in memory all the time."""
        bucket = self.traits.optimizer_bucket or self.spec.offload.optimizer_bucket
        return {"optimizer_bucket": min(bucket, self.trainer.streamed)}

    def trainer_asleep(self) -> dict[str, int]:
        if self.spec.offload.train == "none":
            return self.trainer_awake()
        stays = self.spec.lora is not None and not self.traits.paused_adapters
        adapters = {"adapters_and_gradients": self.trainer.trained} if stays else {}
        return {**adapters, **self.bucket()}

    def working_set(self) -> dict[str, int]:
        return {"activations": self.trainer.activations, "logits": self.trainer.logits}

    def engine_awake(self) -> dict[str, int]:
        return {"engine_weights": self.engine.weights, "kv_cache": cache_pool_bytes(self.spec)}

    def engine_asleep(self) -> dict[str, int]:
        return self.engine_awake() if self.spec.offload.rollout == "none" else {}


def cache_pool_bytes(spec: JobSpec) -> int:
    """Return the cache pool of an engine on one GPU: what its memory fraction leaves beside the weights."""
    engine = engine_footprint(spec)
    if spec.rollout.engine != "sglang" or spec.cluster.gpu_memory is None:
        return engine.cache_needed
    fraction = spec.rollout.mem_fraction_static or DEFAULT_MEM_FRACTION
    return max(0, round(fraction * spec.cluster.gpu_memory) - engine.weights)


def plan_memory(spec: JobSpec, traits: EngineTraits) -> MemoryPlan:
    """Return the memory of every phase, for a spec whose layout is sound."""
    stages = trainer_footprints(spec, traits.longest_sample_tokens)
    sides = _Sides(
        spec=spec,
        traits=traits,
        trainer=max(stages, key=_awake_bytes),
        most_weights=max(stage.weights for stage in stages),
        engine=engine_footprint(spec),
    )
    limits = _limits(spec)
    on_gpu = spec.cluster.device == "gpu"
    phases = []
    for name in PHASES:
        device = _device_parts(sides, name)
        host = _host_parts(sides, name) if on_gpu else _cpu_host_parts(sides, device)
        if name == "load" or not spec.offload.drop_page_cache:
            host["page_cache"] = _page_cache(sides, limits, sum(host.values()))
        phases.append(_phase(name, host, device if on_gpu else {}, _scratch_parts(sides)))
    host_limit = limits.host_bytes_per_node
    return MemoryPlan(
        limits=limits,
        phases=tuple(phases),
        alarm_host_bytes_per_node=None
        if host_limit is None
        else round(ALARM_FRACTION * host_limit),
    )


def _phase(
    name: PhaseName, host: dict[str, int], gpu: dict[str, int], scratch: dict[str, int]
) -> Phase:
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


def _awake_bytes(trainer: TrainerFootprint) -> int:
    return (
        trainer.weights + trainer.trained + trainer.optimizer + trainer.activations + trainer.logits
    )


def _to_disk(spec: JobSpec) -> bool:
    return spec.offload.train == "disk"


def _scratch_parts(sides: _Sides) -> dict[str, int]:
    """Return what is on a node's scratch disk; of streamed optimizer state, what is and what a step writes."""
    spec, ranks = sides.spec, ranks_per_node(sides.spec)
    trainer = {"trainer": ranks * sides.paused} if _to_disk(spec) else {}
    streamed = sides.trainer.streamed // ADAM_BYTES * sides.traits.streamed_bytes
    return {**trainer, "optimizer": ranks * streamed}


def _staging_bytes(sides: _Sides) -> int:
    """Return the staging memory of one node's ranks, for the offload and for streamed optimizer state."""
    spec = sides.spec
    users = _to_disk(spec) + spec.offload.stream_optimizer
    return ranks_per_node(spec) * users * sides.traits.staging_chunks * spec.offload.chunk


def _limits(spec: JobSpec) -> Limits:
    cluster = spec.cluster
    given = [size for size in (cluster.node_memory, cluster.memory_per_node) if size is not None]
    return Limits(
        host_bytes_per_node=min(given, default=None),
        gpu_bytes_per_gpu=cluster.gpu_memory if cluster.device == "gpu" else None,
        scratch_bytes_per_node=spec.offload.scratch_min_free
        if _to_disk(spec) or spec.offload.stream_optimizer
        else None,
    )


def _device_parts(sides: _Sides, name: PhaseName) -> dict[str, int]:
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
        buffer = {"update_buffer": UPDATE_BUFFER_BYTES} if spec.cluster.device == "gpu" else {}
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


def _host_parts(sides: _Sides, name: PhaseName) -> dict[str, int]:
    """Return what a GPU node holds in host memory."""
    spec, ranks = sides.spec, ranks_per_node(sides.spec)
    weights = sides.most_weights
    parts = {
        "object_store": OBJECT_STORE_BYTES["gpu"],
        "residual": _residual(ranks, weights),
        "pinned_trainer_copy": ranks * weights * sides.traits.pinned_copies,
    }
    if spec.train.optimizer_cpu_offload:
        parts["optimizer"] = ranks * sides.trainer.optimizer
    parts["staging"] = _staging_bytes(sides)
    trainer = {"trainer_backup": ranks * sides.paused} if spec.offload.train == "host" else {}
    keeps = sides.traits.keeps_engine_copy and spec.offload.rollout == "host"
    engine = {"engine_backup": ranks * sides.engine.weights} if keeps else {}
    if name in ("rollout", "weight_sync"):
        return {**parts, **trainer}
    if name == "save":
        return {**parts, **engine, "checkpoint_staging": ranks * _saved_bytes(sides)}
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


def _saved_bytes(sides: _Sides) -> int:
    """Return what one rank copies to host memory to write its part of a checkpoint; what is there already needs no copy."""
    if sides.spec.lora is not None:
        return sides.trainer.trained
    if sides.spec.train.optimizer_cpu_offload:
        return 0
    return sides.trainer.optimizer


def _cpu_host_parts(sides: _Sides, device: dict[str, int]) -> dict[str, int]:
    """Return what a CPU node holds: what would be on its GPUs, and the processes themselves.

    A transformers engine keeps its weights in the same memory awake or asleep, and a trainer that is not offloaded to disk
    stays where it is.
    """
    spec, ranks = sides.spec, ranks_per_node(sides.spec)
    held = {**device, "engine_weights": sides.engine.weights}
    if not _to_disk(spec):
        held |= sides.trainer_awake()
    parts = {part: ranks * count for part, count in held.items()}
    parts["processes"] = ranks * CPU_RANK_BYTES + CPU_NODE_BYTES
    parts["object_store"] = OBJECT_STORE_BYTES["cpu"]
    parts["staging"] = _staging_bytes(sides)
    return parts


def _page_cache(sides: _Sides, limits: Limits, others: int) -> int:
    """Return what the checkpoint files leave in the page cache: their size, or the room that is left.

    Every node reads the whole checkpoint of the rollout engines; its trainer ranks read their own shards of a converted
    checkpoint, else the whole checkpoint again when it is another one.
    """
    spec = sides.spec
    model, params = spec.model, count_params(spec.model)
    engine_file = sides.engine.weights * spec.rollout.gpus_per_engine
    trainer_file = 0
    if model.megatron_checkpoint is not None:
        trainer_file = ranks_per_node(spec) * sides.most_weights
    elif model.rollout_checkpoint is not None:
        trainer_file = params.total * DTYPE_BYTES[model.train_dtype]
    files = engine_file + trainer_file
    room = limits.host_bytes_per_node
    return files if room is None else max(0, min(files, room - others))
