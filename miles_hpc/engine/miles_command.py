"""The command of Miles' driver script: every flag that follows from a spec, in one list.

`train_flags` is what `plan` shows and what runs, but for what only the head node can know: the model arguments of Miles' own
scripts/models, and from which checkpoint an attempt continues (`miles_driver`). What a flag means is Miles' affair;
which key owns it is `engine.miles_flags`. Pure: reads no file.
"""

import json
from collections.abc import Iterator, Mapping

from miles_hpc.engine.miles_flags import Flags, FlagValue
from miles_hpc.engine.miles_revisions import is_lacking
from miles_hpc.plan.batch import global_batch_size
from miles_hpc.plan.grid import ranks_per_node, rollout_size, trainer_ranks_per_node, world_size
from miles_hpc.spec.job import JobSpec

CHECKPOINTS = "{run_dir}/checkpoints"
SAVE_TRIGGER_PATH = "{attempt_dir}/requests/miles_save"
ROLLOUT_FILE = "sglang.yaml"
"""Name in the run folder's engine/ of what each rollout engine serves."""

_MIB = 2**20
_OWN_ATTENTION = ("deepseek_v4", "inkling")
"""Families whose launchers leave Megatron's attention backend to the model."""


def train_flags(spec: JobSpec) -> tuple[str, ...]:
    """Return the flags of Miles' driver script; `{run_dir}` and the like are filled on the head node.

    Source: radixark/miles 31f1ca961 and 57b381de5 miles/utils/arguments.py, scripts/run_*.py; Megatron-LM
    megatron/training/arguments.py.
    """
    parts = (
        _checkpoints,
        _adapters,
        _data,
        _rollout,
        _batches,
        _optimizer,
        _policy,
        _grid,
        _engines,
        _offload,
        _nodes,
    )
    ours = [word for part in parts for word in part(spec)]
    return (*ours, *_defaults(spec), *_raw(spec))


def engine_files(spec: JobSpec) -> Mapping[str, str]:
    """Return the files, by name in the run folder's engine/, that the command names.

    Source: radixark/miles 31f1ca961 miles/ray/rollout/rollout_server.py (sglang_config). JSON is YAML too.
    """
    model = spec.model
    if spec.job.engine != "miles" or model.rollout_checkpoint is None:
        return {}
    served = {
        "name": "default",
        "model_path": str(model.rollout_checkpoint),
        # Off by default for a folder other than --hf-checkpoint, and then the engines keep the first policy for ever.
        "update_weights": True,
        # All GPUs of the group, which Miles divides into engines.
        "server_groups": [{"worker_type": "regular", "num_gpus": rollout_size(spec)}],
    }
    return {ROLLOUT_FILE: json.dumps({"sglang": [served]}, indent=2) + "\n"}


def _checkpoints(spec: JobSpec) -> Iterator[str]:
    model, checkpoint = spec.model, spec.checkpoint
    yield from ("--hf-checkpoint", str(model.hf_checkpoint))
    if model.megatron_checkpoint is not None:
        yield from ("--ref-load", str(model.megatron_checkpoint))
    yield from ("--save", CHECKPOINTS)
    # Without an interval Miles never saves; one as long as the run saves at its last step.
    yield from ("--save-interval", str(checkpoint.save_interval or spec.train.num_steps))
    engine = spec.engine.miles
    if engine is None or not is_lacking(engine.revision, "save-trigger-sentinel"):
        yield from ("--save-trigger-sentinel", SAVE_TRIGGER_PATH)
    if checkpoint.save_hf and spec.lora is None:
        yield from ("--save-hf", f"{CHECKPOINTS}/hf/{{rollout_id}}")


def _adapters(spec: JobSpec) -> Iterator[str]:
    lora = spec.lora
    if lora is None:
        return
    yield from ("--lora-rank", str(lora.rank), "--lora-alpha", _number(lora.alpha))
    yield from ("--lora-dropout", _number(lora.dropout))
    yield from ("--target-modules", ",".join(lora.target_modules))
    # Megatron's fused accumulation writes gradients of the frozen base too.
    yield "--no-gradient-accumulation-fusion"
    if spec.offload.base_cpu_backup:
        yield "--lora-base-cpu-backup"


def _data(spec: JobSpec) -> Iterator[str]:
    data = spec.data
    yield from ("--prompt-data", str(data.path), "--input-key", data.input_key)
    for flag, value in (
        ("--label-key", data.label_key),
        ("--metadata-key", data.metadata_key),
        ("--rm-type", data.reward),
    ):
        if value is not None:
            yield from (flag, value)
    if data.apply_chat_template:
        yield "--apply-chat-template"
    if data.shuffle:
        yield "--rollout-shuffle"
    yield from ("--seed", str(spec.train.seed), "--rollout-seed", str(spec.train.seed))


def _rollout(spec: JobSpec) -> Iterator[str]:
    rollout = spec.rollout
    yield from ("--num-rollout", str(spec.train.num_steps))
    yield from ("--rollout-batch-size", str(rollout.prompts_per_step))
    yield from ("--n-samples-per-prompt", str(rollout.samples_per_prompt))
    yield from ("--rollout-max-prompt-len", str(rollout.max_prompt_tokens))
    yield from ("--rollout-max-response-len", str(rollout.max_response_tokens))
    yield from ("--rollout-temperature", _number(rollout.temperature))
    yield from ("--rollout-top-p", _number(rollout.top_p))


def _batches(spec: JobSpec) -> Iterator[str]:
    train = spec.train
    yield from ("--global-batch-size", str(global_batch_size(spec)))
    if train.max_tokens_per_gpu is not None:
        yield "--use-dynamic-batch-size"
        yield from ("--max-tokens-per-gpu", str(train.max_tokens_per_gpu))
    else:
        yield from ("--micro-batch-size", str(train.micro_batch_size or 1))
    if train.recompute == "full":
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform")
        yield from ("--recompute-num-layers", "1")
    elif train.recompute == "selective":
        yield from ("--recompute-granularity", "selective")


def _optimizer(spec: JobSpec) -> Iterator[str]:
    train = spec.train
    yield from ("--lr", _number(train.learning_rate))
    yield from ("--weight-decay", _number(train.weight_decay))
    yield from ("--adam-beta1", _number(train.adam_betas[0]))
    yield from ("--adam-beta2", _number(train.adam_betas[1]))
    yield from ("--adam-eps", _number(train.adam_eps), "--clip-grad", _number(train.clip_grad))
    if train.optimizer_cpu_offload:
        yield "--optimizer-cpu-offload"


def _policy(spec: JobSpec) -> Iterator[str]:
    train = spec.train
    yield from ("--eps-clip", _number(train.clip_low), "--eps-clip-high", _number(train.clip_high))
    if train.kl_coef > 0:
        # At 0 it would still load a reference and pin its weights.
        yield from ("--use-kl-loss", "--kl-loss-coef", _number(train.kl_coef))
    if train.loss_aggregation == "token":
        yield "--calculate-per-token-loss"
    if not train.normalise_advantages:
        yield "--disable-grpo-std-normalization"


def _grid(spec: JobSpec) -> Iterator[str]:
    parallel = spec.parallel
    for flag, size in (
        ("--tensor-model-parallel-size", parallel.tp),
        ("--pipeline-model-parallel-size", parallel.pp),
        ("--context-parallel-size", parallel.cp),
        ("--expert-model-parallel-size", parallel.ep),
        ("--expert-tensor-parallel-size", parallel.etp),
        ("--decoder-first-pipeline-num-layers", parallel.first_stage_layers),
        ("--decoder-last-pipeline-num-layers", parallel.last_stage_layers),
    ):
        if size is not None:
            yield from (flag, str(size))
    if parallel.sequence_parallel:
        yield "--sequence-parallel"


def _engines(spec: JobSpec) -> Iterator[str]:
    rollout = spec.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    rank = None if spec.lora is None else spec.lora.rank
    yield from ("--rollout-num-gpus-per-engine", str(rollout.gpus_per_engine))
    for flag, value in (
        ("--sglang-ep-size", rollout.expert_parallel),
        ("--sglang-mem-fraction-static", rollout.mem_fraction_static),
        ("--sglang-max-running-requests", rollout.max_running_requests),
        ("--sglang-context-length", rollout.context_length or longest),
        ("--sglang-attention-backend", rollout.attention_backend),
        ("--sglang-moe-runner-backend", rollout.moe_runner_backend),
        ("--sglang-max-lora-rank", rank),
        ("--sglang-lora-backend", rollout.lora_backend),
    ):
        if value is not None:
            yield from (flag, _number(value) if isinstance(value, float) else str(value))
    if spec.model.rollout_checkpoint is not None:
        yield from ("--sglang-config", f"{{run_dir}}/engine/{ROLLOUT_FILE}")


def _offload(spec: JobSpec) -> Iterator[str]:
    """Yield what differs from Miles' defaults: on shared GPUs both sides go to host memory, overlapping there."""
    offload, is_shared = spec.offload, spec.rollout.own_gpus is None
    if _rolls_out_only(spec):
        return  # Miles then switches offloading off and refuses the flags that need it
    if offload.train == "none" and is_shared:
        yield "--no-offload-train"
    if offload.train == "disk":
        yield from ("--offload-train-target", "disk")
    if offload.stream_optimizer:
        yield "--stream-optimizer-state-to-disk"
    if offload.train == "disk" or offload.stream_optimizer:
        # Ray fills ${...} on each rank's own node. The optimizer's stream takes the word as it is, from every node alike.
        root = "{scratch_dir}" if offload.stream_optimizer else "${MILES_HPC_SCRATCH}"
        yield from ("--offload-train-disk-dir", f"{root}/miles")
        yield from ("--offload-train-disk-chunk-mb", str(max(1, -(-offload.chunk // _MIB))))
    if offload.rollout == "none" and is_shared:
        yield "--no-offload-rollout"
    if offload.peak_device == "gpu":
        yield from ("--colocate-memory-peak-device", "gpu")


def _nodes(spec: JobSpec) -> Iterator[str]:
    ranks, own = max(1, trainer_ranks_per_node(spec)), spec.rollout.own_gpus
    yield from ("--actor-num-nodes", str(world_size(spec) // ranks))
    yield from ("--actor-num-gpus-per-node", str(ranks))
    # Miles counts 8 GPUs a node unless told otherwise.
    yield from ("--num-gpus-per-node", str(ranks_per_node(spec)))
    yield from ("--colocate",) if own is None else ("--rollout-num-gpus", str(own))
    if _rolls_out_only(spec):
        yield "--debug-rollout-only"


def _rolls_out_only(spec: JobSpec) -> bool:
    engine = spec.engine.miles
    return engine is not None and engine.mode == "debug_rollout_only"


def _defaults(spec: JobSpec) -> Iterator[str]:
    """Yield what every launcher of Miles sets, unless the raw flags say otherwise."""
    choices: tuple[tuple[str, str | None], ...] = (
        ("optimizer", "adam"),
        ("lr-decay-style", "constant"),
        ("advantage-estimator", "grpo"),
        ("attention-dropout", "0.0"),  # Megatron's own default is 0.1
        ("hidden-dropout", "0.0"),
        ("accumulate-allreduce-grads-in-fp32", None),
        ("attention-softmax-in-fp32", None),
    )
    if spec.model.family not in _OWN_ATTENTION:
        choices += (("attention-backend", "flash"),)
    if spec.train.optimizer_cpu_offload:
        choices += (
            ("overlap-cpu-optimizer-d2h-h2d", None),
            ("use-precision-aware-optimizer", None),
        )
    if spec.train.kl_coef > 0:
        choices += (("kl-loss-type", "low_var_kl"),)
    stated = _stated(spec)
    if "grad-reduce-in-bf16" in stated:
        stated |= {"accumulate-allreduce-grads-in-fp32"}
    for name, value in choices:
        if name not in stated:
            yield f"--{name}"
            if value is not None:
                yield value


def _stated(spec: JobSpec) -> frozenset[str]:
    engine = spec.engine.miles
    switched_off = () if engine is None else engine.extra_args
    return frozenset({*(flag.base for flag in Flags(spec).all), *switched_off})


def _raw(spec: JobSpec) -> Iterator[str]:
    engine = spec.engine.miles
    for name, value in ({} if engine is None else engine.extra_args).items():
        if value is False:
            continue
        yield f"--{name}"
        yield from _words(value)


def _words(value: FlagValue) -> tuple[str, ...]:
    if value is True:
        return ()
    if isinstance(value, tuple):
        return value
    return (_number(value) if isinstance(value, float) else str(value),)


def _number(value: float) -> str:
    """Return the shortest text that reads back as `value`; Miles takes some of these as whole numbers."""
    return str(int(value)) if value == int(value) else repr(value)
