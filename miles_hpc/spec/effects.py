"""The rules about keys that need one another: without effect in this mode, required by it, or excluded by it.

Each rule is a row: the keys and the condition under which they have an effect, must be there, or cannot be. Knows no file
and no flag of an engine; what needs arithmetic is `plan`'s.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from miles_hpc.spec.conditions import (
    Condition,
    above_one,
    all_of,
    any_of,
    equals,
    is_on,
    other_than,
    written,
)
from miles_hpc.spec.effect_rules import (
    AXIS_KEYS,
    DATA_KEYS,
    DEVICE_KEYS,
    ENGINE,
    EXPERT_KEYS,
    FAMILY_KEYS,
    MICRO_BATCH,
    MILES_KEYS,
    NATIVE_LIMITS,
    NCCL_KEYS,
    OFFLOAD_KEYS,
    RESUME_KEYS,
    ROLLOUT_ENGINE,
    SGLANG_KEYS,
    SLURM_KEYS,
    WEIGHTS_KEYS,
)
from miles_hpc.spec.faults import format_value
from miles_hpc.spec.model import (
    DENSE_FAMILIES,
    EXPERT_FAMILIES,
    FOREIGN_FAMILIES,
    LATENT_FAMILIES,
    LINEAR_FAMILIES,
)
from miles_hpc.spec.rules import Rule, Settings, Violation
from miles_hpc.spec.schema import spec_keys


@dataclass(frozen=True, slots=True)
class Effect:
    """Keys that have an effect only under a condition; `neutral` values ask for nothing and may stand anywhere."""

    rule: Rule
    when: Condition
    keys: tuple[str, ...]
    neutral: tuple[object, ...] = (False,)


@dataclass(frozen=True, slots=True)
class Requirement:
    """Keys that must be written under a condition."""

    rule: Rule
    when: Condition
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A key whose value cannot be as it is under a condition; `expected` says what could stand there."""

    rule: Rule
    when: Condition
    key: str
    expected: str


_NATIVE, _MILES_ENGINE = equals("job.engine", "native"), equals("job.engine", "miles")
_GPU, _CPU = equals("cluster.device", "gpu"), equals("cluster.device", "cpu")
_SGLANG, _TRANSFORMERS = (
    equals("rollout.engine", "sglang"),
    equals("rollout.engine", "transformers"),
)
_TASKS, _FILE = equals("data.source", "reasoning_gym"), equals("data.source", "jsonl")
_CHECKPOINT = equals("model.weights", "checkpoint")
_PACKAGE_GGUF = equals("model.weights", "package_gguf")
_STREAMED = is_on("offload.stream_optimizer")
_LATENT_FAMILY = equals("model.family", *LATENT_FAMILIES)
_EXPERT_FAMILY = equals("model.family", *EXPERT_FAMILIES)
_EXPERTS = ("model.num_experts", "model.experts_per_token", "model.moe_ffn_hidden_size")
_LATENT = (
    "model.q_lora_rank",
    "model.kv_lora_rank",
    "model.qk_rope_head_dim",
    "model.v_head_dim",
)
_SLURM_KEYS = (
    "cluster.exclusive",
    "cluster.partition",
    "cluster.account",
    "cluster.qos",
    "cluster.constraint",
    "cluster.reservation",
    "cluster.gpu_request",
    "cluster.gpu_type",
    "cluster.segment",
    "cluster.sbatch_options",
    "cluster.srun_options",
)

EFFECTS: Sequence[Effect] = (
    Effect(ENGINE, _NATIVE, ("engine.native",)),
    Effect(ENGINE, _MILES_ENGINE, ("engine.miles",)),
    Effect(
        MILES_KEYS,
        _MILES_ENGINE,
        (
            "model.megatron_checkpoint",
            "rollout.own_gpus",
            "train.optimizer_cpu_offload",
            "offload.base_cpu_backup",
        ),
    ),
    Effect(
        SGLANG_KEYS,
        _SGLANG,
        (
            "rollout.mem_fraction_static",
            "rollout.max_running_requests",
            "rollout.context_length",
            "rollout.expert_parallel",
            "rollout.attention_backend",
            "rollout.moe_runner_backend",
            "rollout.lora_backend",
        ),
    ),
    Effect(SGLANG_KEYS, _TRANSFORMERS, ("engine.native.threads_per_engine",)),
    Effect(
        DEVICE_KEYS,
        _GPU,
        (
            "cluster.gpus_per_node",
            "cluster.gpu_memory",
            "cluster.gpu_request",
            "cluster.gpu_type",
            "network.ib_hca",
        ),
        neutral=(0, "none"),
    ),
    Effect(
        DEVICE_KEYS, equals("cluster.gpu_request", "gres", "gpus-per-node"), ("cluster.gpu_type",)
    ),
    Effect(DEVICE_KEYS, _CPU, ("cluster.cpu_ranks_per_node", "engine.native.cpu_dtype")),
    Effect(
        WEIGHTS_KEYS,
        _CHECKPOINT,
        ("model.hf_checkpoint", "model.megatron_checkpoint", "model.rollout_checkpoint"),
    ),
    Effect(WEIGHTS_KEYS, _PACKAGE_GGUF, ("model.gguf_package", "model.gguf_file")),
    Effect(WEIGHTS_KEYS, equals("model.weights", "random"), ("model.initializer_range",)),
    Effect(
        EXPERT_KEYS,
        written(*_EXPERTS),
        (
            "model.shared_expert_ffn_hidden_size",
            "model.num_dense_layers",
            "rollout.moe_runner_backend",
        ),
        neutral=(0,),
    ),
    Effect(DATA_KEYS, _TASKS, ("data.task", "data.task_options", "data.instruction")),
    Effect(
        DATA_KEYS,
        _FILE,
        (
            "data.path",
            "data.input_key",
            "data.label_key",
            "data.metadata_key",
            "data.reward",
            "data.apply_chat_template",
            "data.shuffle",
        ),
        neutral=(),
    ),
    Effect(
        AXIS_KEYS,
        above_one("parallel.pp"),
        ("parallel.first_stage_layers", "parallel.last_stage_layers"),
    ),
    Effect(AXIS_KEYS, above_one("parallel.tp"), ("parallel.sequence_parallel",)),
    Effect(RESUME_KEYS, equals("job.resume", "auto"), ("job.max_attempts",), neutral=(1,)),
    Effect(
        OFFLOAD_KEYS,
        any_of(equals("offload.train", "disk"), _STREAMED),
        ("offload.chunk",),
    ),
    Effect(
        OFFLOAD_KEYS,
        all_of(_NATIVE, _STREAMED),
        ("offload.optimizer_bucket",),
        neutral=("256MiB",),
    ),
    Effect(
        OFFLOAD_KEYS,
        all_of(_GPU, equals("offload.train", "host", "disk"), equals("offload.rollout", "host")),
        ("offload.peak_device",),
        neutral=("cpu",),
    ),
    Effect(
        OFFLOAD_KEYS,
        all_of(written("lora"), equals("offload.rollout", "host")),
        ("offload.base_cpu_backup",),
    ),
    Effect(FAMILY_KEYS, _LATENT_FAMILY, _LATENT),
    Effect(FAMILY_KEYS, equals("model.family", "glm_dsa"), ("model.dsa_topk_layers",)),
    Effect(
        FAMILY_KEYS,
        equals("model.family", *LINEAR_FAMILIES),
        ("model.full_attention_interval",),
    ),
    Effect(NCCL_KEYS, other_than("nccl.preload", "false"), ("nccl.path", "nccl.on_mismatch")),
)

REQUIREMENTS: Sequence[Requirement] = (
    Requirement(ENGINE, _MILES_ENGINE, ("engine.miles",)),
    Requirement(DEVICE_KEYS, _GPU, ("cluster.gpus_per_node",)),
    Requirement(WEIGHTS_KEYS, _CHECKPOINT, ("model.hf_checkpoint",)),
    Requirement(WEIGHTS_KEYS, _PACKAGE_GGUF, ("model.gguf_package", "model.gguf_file")),
    Requirement(EXPERT_KEYS, _EXPERT_FAMILY, _EXPERTS),
    Requirement(EXPERT_KEYS, written(*_EXPERTS), _EXPERTS),
    Requirement(FAMILY_KEYS, written(*_LATENT), _LATENT),
    Requirement(DATA_KEYS, _TASKS, ("data.task",)),
    Requirement(DATA_KEYS, _FILE, ("data.path",)),
)

REFUSALS: Sequence[Refusal] = (
    Refusal(
        MICRO_BATCH,
        all_of(written("train.micro_batch_size"), written("train.max_tokens_per_gpu")),
        "train.micro_batch_size",
        "either this key or train.max_tokens_per_gpu",
    ),
    Refusal(
        ROLLOUT_ENGINE,
        all_of(_TRANSFORMERS, _MILES_ENGINE),
        "rollout.engine",
        '"sglang" with job.engine = "miles"',
    ),
    Refusal(
        ROLLOUT_ENGINE,
        all_of(_TRANSFORMERS, _NATIVE, _GPU),
        "rollout.engine",
        '"sglang" with cluster.device = "gpu"',
    ),
    Refusal(
        ROLLOUT_ENGINE,
        all_of(_CPU, _MILES_ENGINE),
        "cluster.device",
        '"gpu" with job.engine = "miles"',
    ),
    Refusal(
        DATA_KEYS,
        all_of(_FILE, _NATIVE),
        "data.source",
        '"reasoning_gym" with job.engine = "native"',
    ),
    Refusal(
        DATA_KEYS,
        all_of(_TASKS, _MILES_ENGINE),
        "data.source",
        '"jsonl" with job.engine = "miles"',
    ),
    Refusal(
        OFFLOAD_KEYS,
        all_of(
            equals("agent.on_memory_alarm", "drop_page_cache"),
            other_than("offload.drop_page_cache", "true"),
        ),
        "agent.on_memory_alarm",
        "offload.drop_page_cache = true, which chooses the files that are dropped",
    ),
    Refusal(
        NATIVE_LIMITS,
        all_of(_NATIVE, other_than("rollout.top_p", "1.0", "1")),
        "rollout.top_p",
        '1.0 with job.engine = "native"',
    ),
    Refusal(
        NATIVE_LIMITS,
        all_of(_NATIVE, written("lora"), other_than("lora.dropout", "0.0", "0")),
        "lora.dropout",
        '0 with job.engine = "native"',
    ),
    Refusal(
        NATIVE_LIMITS,
        all_of(_NATIVE, equals("model.family", *FOREIGN_FAMILIES)),
        "model.family",
        '"llama" or "qwen3" with job.engine = "native"',
    ),
    *(
        Refusal(
            EXPERT_KEYS,
            all_of(written(key), equals("model.family", *DENSE_FAMILIES)),
            key,
            "no experts in a dense model.family",
        )
        for key in _EXPERTS
    ),
)


def check_effects(settings: Settings) -> Iterator[Violation]:
    """Yield the keys that are without effect, missing or excluded."""
    for effect in EFFECTS:
        if not effect.when.holds(settings):
            yield from _inert(effect, settings)
    for requirement in REQUIREMENTS:
        if requirement.when.holds(settings):
            yield from _missing(requirement, settings)
    for refusal in REFUSALS:
        if refusal.when.holds(settings):
            yield Violation(
                rule=refusal.rule,
                path=tuple(refusal.key.split(".")),
                found=format_value(settings.value(refusal.key)),
                expected=refusal.expected,
            )
    if settings.local:
        yield from _local_overrides(settings)


def _inert(effect: Effect, settings: Settings) -> Iterator[Violation]:
    if not all(settings.is_decided(key) for key in effect.when.keys):
        return  # that fault is told already; what follows from it is not known
    decided = "; ".join(settings.shown(key) for key in effect.when.keys)
    for key in effect.keys:
        value = settings.written(key)
        if value is None or any(value == neutral for neutral in effect.neutral):
            continue
        yield Violation(
            rule=effect.rule,
            path=tuple(key.split(".")),
            found=f"a {'table' if isinstance(value, dict) else 'key'} without effect here ({decided})",
            expected=f"it only with {effect.when.words}",
            fix="remove it",
            inert=True,
        )


def _missing(requirement: Requirement, settings: Settings) -> Iterator[Violation]:
    for key in requirement.keys:
        table = key.partition(".")[0]
        is_told = spec_keys()[table,].required and settings.written(table) is None
        if settings.written(key) is None and not is_told:
            yield Violation(
                rule=requirement.rule,
                path=tuple(key.split(".")),
                found="nothing",
                expected=f"a value, which {requirement.when.words} demands",
            )


def _local_overrides(settings: Settings) -> Iterator[Violation]:
    for key in _SLURM_KEYS:
        path = tuple(key.split("."))
        if path in settings.overridden:
            yield Violation(
                rule=SLURM_KEYS,
                path=path,
                found="a key of Slurm on the command line of a local job",
                expected="it only for a job that Slurm runs",
                fix="remove it",
            )
