"""The two sides of a job, trainer and rollout: what each has on a GPU awake and asleep, and what both leave on a node.

Arithmetic over `footprint` and an engine's `EngineTraits`. When a side is awake is `memory`, or `separate` for rollout
engines with GPUs of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from miles_hpc.plan.footprint import (
    ADAM_BYTES,
    DTYPE_BYTES,
    GRADIENT_BYTES,
    EngineFootprint,
    TrainerFootprint,
    engine_footprint,
    trainer_footprints,
)
from miles_hpc.plan.grid import trainer_ranks_per_node
from miles_hpc.plan.shape import count_params
from miles_hpc.spec.job import JobSpec

GB, GIB, MIB = 10**9, 2**30, 2**20
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
        update_buffer: GPU memory of the buckets in which weights travel to the engines.
        streamed_bytes: bytes on disk of each parameter whose optimizer state is streamed; twice the state where a step reads
            one file and writes another.
        gradient_bytes: bytes of each gradient in full training.
        optimizer_bucket: memory of the bucket of streamed state where the engine fixes it.
    """

    pinned_copies: int = 0
    keeps_engine_copy: bool = True
    rebuilds_weights: bool = False
    paused_adapters: bool = True
    longest_sample_tokens: int | None = None
    staging_chunks: int = 2
    update_buffer: int = UPDATE_BUFFER_BYTES
    streamed_bytes: int = 2 * ADAM_BYTES
    optimizer_bucket: int | None = None
    gradient_bytes: int = GRADIENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The two sides of one job, on one rank and its GPU.

    Attributes:
        trainer: of the pipeline stage that takes most.
        most_weights: trainer weights of the rank that has most of them.
    """

    spec: JobSpec
    traits: EngineTraits
    trainer: TrainerFootprint
    most_weights: int
    engine: EngineFootprint

    @property
    def ranks(self) -> int:
        """Trainer ranks on a node that has some."""
        return trainer_ranks_per_node(self.spec)

    @property
    def optimizer_on_device(self) -> int:
        """Optimizer state in GPU memory."""
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
        """Return what a trainer rank has on its GPU outside forward and backward."""
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
        """Return what stays on the GPU of a sleeping trainer rank."""
        if self.spec.offload.train == "none":
            return self.trainer_awake()
        stays = self.spec.lora is not None and not self.traits.paused_adapters
        adapters = {"adapters_and_gradients": self.trainer.trained} if stays else {}
        return {**adapters, **self.bucket()}

    def working_set(self) -> dict[str, int]:
        """Return what forward and backward add."""
        return {"activations": self.trainer.activations, "logits": self.trainer.logits}

    def engine_awake(self) -> dict[str, int]:
        """Return what a rollout engine has on one of its GPUs."""
        return {"engine_weights": self.engine.weights, "kv_cache": cache_pool_bytes(self.spec)}

    def engine_asleep(self) -> dict[str, int]:
        """Return what stays on the GPU of a sleeping rollout engine."""
        return self.engine_awake() if self.spec.offload.rollout == "none" else {}


def make_sides(spec: JobSpec, traits: EngineTraits) -> Sides:
    """Return the two sides of `spec`, whose layout is sound."""
    stages = trainer_footprints(spec, traits.longest_sample_tokens, traits.gradient_bytes)
    return Sides(
        spec=spec,
        traits=traits,
        trainer=max(stages, key=_awake_bytes),
        most_weights=max(stage.weights for stage in stages),
        engine=engine_footprint(spec),
    )


def cache_pool_bytes(spec: JobSpec) -> int:
    """Return the cache pool of an engine on one GPU: what its memory fraction leaves beside the weights."""
    engine = engine_footprint(spec)
    if spec.rollout.engine != "sglang" or spec.cluster.gpu_memory is None:
        return engine.cache_needed
    fraction = spec.rollout.mem_fraction_static or DEFAULT_MEM_FRACTION
    return max(0, round(fraction * spec.cluster.gpu_memory) - engine.weights)


def _awake_bytes(trainer: TrainerFootprint) -> int:
    return (
        trainer.weights + trainer.trained + trainer.optimizer + trainer.activations + trainer.logits
    )


def pinned_parts(sides: Sides) -> dict[str, int]:
    """Return what the trainer ranks of a node keep in its memory all the time."""
    parts = {"pinned_trainer_copy": sides.ranks * sides.most_weights * sides.traits.pinned_copies}
    if sides.spec.train.optimizer_cpu_offload:
        parts["optimizer"] = sides.ranks * sides.trainer.optimizer
    return {**parts, "staging": staging_bytes(sides)}


def staging_bytes(sides: Sides) -> int:
    """Return the staging memory of one node's ranks, for the offload and for streamed optimizer state."""
    offload = sides.spec.offload
    users = (offload.train == "disk") + offload.stream_optimizer
    return sides.ranks * users * sides.traits.staging_chunks * offload.chunk


def scratch_parts(sides: Sides) -> dict[str, int]:
    """Return what is on a node's scratch disk; of streamed optimizer state, what is and what a step writes."""
    asleep = {"trainer": sides.ranks * sides.paused} if sides.spec.offload.train == "disk" else {}
    streamed = sides.trainer.streamed // ADAM_BYTES * sides.traits.streamed_bytes
    return {**asleep, "optimizer": sides.ranks * streamed}


def saved_bytes(sides: Sides) -> int:
    """Return what one rank copies to host memory to write its part of a checkpoint; what is there already needs no copy."""
    if sides.spec.lora is not None:
        return sides.trainer.trained
    if sides.spec.train.optimizer_cpu_offload:
        return 0
    return sides.trainer.optimizer


def engine_file_bytes(sides: Sides) -> int:
    """Return the checkpoint that every node with rollout engines reads."""
    return sides.engine.weights * sides.spec.rollout.gpus_per_engine


def trainer_file_bytes(sides: Sides) -> int:
    """Return what a node's trainer ranks read: their shards of a converted checkpoint, or the whole one."""
    model = sides.spec.model
    if model.megatron_checkpoint is not None:
        return sides.ranks * sides.most_weights
    return count_params(model).total * DTYPE_BYTES[model.train_dtype]
