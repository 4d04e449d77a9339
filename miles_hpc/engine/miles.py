"""What the Miles engine needs: its driver's command, its models' environment and the limits of what it runs.

The flags of Miles' own script are `engine.miles_command`. Knows nothing of how Miles is started on the head node.
"""

from collections.abc import Iterator

from miles_hpc.engine.miles_command import SAVE_TRIGGER_PATH, train_flags
from miles_hpc.engine.miles_flags import NOT_EXPOSED, OWNED, Flags
from miles_hpc.engine.miles_revisions import is_lacking, revisions_with
from miles_hpc.handoff import SaveTrigger
from miles_hpc.plan.batch import longest_sample_tokens
from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.footprint import GRADIENT_BYTES
from miles_hpc.plan.plan import EnvVar
from miles_hpc.plan.sides import UPDATE_BUFFER_BYTES, EngineTraits
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule
from miles_hpc.units import format_bytes

NOTE = (
    "This version shows how it would drive Miles but does not do it yet: submit refuses the plan."
)
_MILES = "radixark/miles 31f1ca961"
DENSE_ATTENTION_TOKENS = 4096
_SCORE_BYTES = 6
_STREAMED_BYTES = {"fp32": 12, "bf16": 8, "fp16": 8, "fp8e4m3": 6, "fp8e5m2": 6}
"""Bytes on disk of a parameter's streamed optimizer state, by the type of its moments; the main weight stays fp32."""
_BUCKET_BYTES = 200_000_000 * 12
"""Streamed state that is on the GPU at a time. Source: miles_plugins/optimizers/nvme_stream.py BUCKET_NUMEL_LIMIT."""
SAVE_TRIGGER = SaveTrigger(path=SAVE_TRIGGER_PATH, done="removed")
"""The file of --save-trigger-sentinel: Miles saves synchronously after the step in which it appears, removes it and goes on.

Source: radixark/miles 31f1ca961 train.py, miles/utils/arguments.py.
"""
_REVISIONS_WITHOUT_ACTOR_COPY = ("18bce68cb", "57b381de5")
"""Head and merge of pull request 2488: under LoRA the sleeping trainer's own backup serves the weight update too."""


def driver_argv(spec: JobSpec, python: str) -> tuple[str, ...]:
    """Return the command of the starter, with Miles' flags after "--".

    The starter adds what only the head node knows, then becomes Miles' script.
    """
    engine = spec.engine.miles
    if engine is None:
        return ()
    return (
        *(python, "-m", "miles_hpc.probe.miles_driver"),
        *("--root", str(engine.root), "--revision", engine.revision),
        *("--megatron", str(engine.megatron_path), "--model-type", engine.model_type),
        *(word for path in engine.python_path for word in ("--python-path", str(path))),
        *("--script", engine.script, "--", *train_flags(spec)),
    )


def save_trigger(spec: JobSpec) -> SaveTrigger | None:
    """Return how Miles is asked to save; None for a revision that cannot be asked."""
    engine = spec.engine.miles
    if engine is not None and is_lacking(engine.revision, "save-trigger-sentinel"):
        return None
    return SAVE_TRIGGER


def make_environment(spec: JobSpec) -> tuple[EnvVar, ...]:
    """Return the variables that Miles' models need beside those of every job."""
    if spec.model.family != "glm_dsa":
        return ()
    variables = (
        EnvVar(
            name="INDEXER_ROPE_NEOX_STYLE",
            value="0",
            why="GLM's sparse-attention indexer interleaves its rotary embedding; the other style ranks other tokens",
            source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py",
        ),
        EnvVar(
            name="SGLANG_NSA_FORCE_MLA",
            value="1",
            why="trainer and engine must take the same attention path for their logprobs to agree",
            source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py",
        ),
    )
    return tuple(variable for variable in variables if variable.name not in spec.env)


def memory_traits(spec: JobSpec) -> EngineTraits:
    """Return what Miles keeps in memory beside the sleeping side's backup.

    A colocated trainer holds a pinned copy of its weights for weight updates, also when it sleeps on disk; revisions
    with deduplication do without it under LoRA, and parameters that are rebuilt from the optimizer's master weights need
    none. Beside engines with GPUs of their own there is one only to switch between models. A reference, a teacher and an
    old actor are one more each, and so is the copy that an old actor is made from at every step. Revisions that are not known are counted as having it. The offload to disk and the
    streamed optimizer state have one pinned chunk each, and the latter's files are written in place.

    Source: radixark/miles 31f1ca961 miles/backends/megatron_utils/actor.py, tensor_backper.py, rematerialize_utils.py; pull
    requests 2488, 3089.
    """
    engine = spec.engine.miles
    revision = "" if engine is None else engine.revision
    shares = revision.startswith(_REVISIONS_WITHOUT_ACTOR_COPY)
    flags = Flags(spec)
    others = _other_models(spec, flags)
    rebuilds = spec.lora is None and bool(flags.value("rematerialize-param-from-master-weight"))
    is_needed = spec.rollout.own_gpus is None or others > 0
    actor = not rebuilds and is_needed and not (spec.lora is not None and shares and not others)
    return EngineTraits(
        pinned_copies=int(actor) + others,
        keeps_engine_copy=spec.offload.base_cpu_backup,
        rebuilds_weights=rebuilds,
        paused_adapters=False,
        longest_sample_tokens=flags.number("max-seq-len") or None,
        staging_chunks=1,
        update_buffer=flags.number("update-weight-buffer-size") or UPDATE_BUFFER_BYTES,
        streamed_bytes=_STREAMED_BYTES.get(
            str(flags.value("stream-optimizer-state-moment-dtype")), _STREAMED_BYTES["fp32"]
        ),
        optimizer_bucket=_BUCKET_BYTES,
        gradient_bytes=2 if flags.value("grad-reduce-in-bf16") else GRADIENT_BYTES,
    )


def _other_models(spec: JobSpec, flags: Flags) -> int:
    """Return the models beside the actor that a trainer rank keeps pinned in host memory."""
    reference = spec.train.kl_coef > 0
    distilled = bool(flags.value("opd-teacher-load"))
    old = 0
    if flags.value("keep-old-actor"):
        old = 1 if flags.number("update-weights-interval") > 1 else 2
    return reference + distilled + old


def _weights(spec: JobSpec) -> Iterator[Verdict]:
    if spec.model.weights != "checkpoint":
        yield Verdict(
            keys=("model.weights", "job.engine"),
            found=f'weights = "{spec.model.weights}" with the miles engine',
            expected='"checkpoint": both sides of Miles load folders',
            fix='Set model.weights = "checkpoint" and model.hf_checkpoint.',
        )


def _native_rollout_type(spec: JobSpec) -> Iterator[Verdict]:
    model = spec.model
    if model.rollout_quantisation in ("fp8", "nvfp4", "int4") and (
        model.rollout_checkpoint is None and model.megatron_checkpoint is None
    ):
        yield Verdict(
            keys=(
                "model.rollout_checkpoint",
                "model.megatron_checkpoint",
                "model.rollout_quantisation",
            ),
            found=f'rollout_quantisation "{model.rollout_quantisation}" from one checkpoint for both sides',
            expected="the trainer's weights and the quantised ones in folders of their own",
            fix="Set model.rollout_checkpoint to the quantised folder, or model.megatron_checkpoint to the trainer's.",
        )


def _agrees(spec: JobSpec) -> Iterator[Verdict]:
    flags = Flags(spec)
    if flags.value("use-rollout-indexer-replay"):
        yield Verdict(
            keys=("engine.miles.extra_args",),
            found="use-rollout-indexer-replay",
            expected="routing replay: indexer replay buffers 78 to 128 GB a rank in host memory on GLM-5.2",
            fix="Use use-rollout-routing-replay.",
        )
    checks = flags.value("check-weight-update-equal")
    if checks and spec.offload.base_cpu_backup:
        yield Verdict(
            keys=("engine.miles.extra_args", "offload.base_cpu_backup"),
            found="check-weight-update-equal with offload.base_cpu_backup",
            expected="one of them: the check switches off the skipped base sync that the backup is kept for",
            fix="Remove check-weight-update-equal.",
        )


def _dense_attention(spec: JobSpec) -> Iterator[Verdict]:
    model = spec.model
    if Flags(spec).value("dsa-attention-backend") != "megatron":
        return
    length = memory_traits(spec).longest_sample_tokens or longest_sample_tokens(spec)
    if length <= DENSE_ATTENTION_TOKENS:
        return
    layers, heads = model.num_layers, model.num_attention_heads // spec.parallel.tp
    needed = layers * heads * _SCORE_BYTES * length**2
    yield Verdict(
        keys=("engine.miles.extra_args", "rollout.max_response_tokens"),
        found=f"dsa-attention-backend megatron: {layers} layers * {heads} heads a rank * {_SCORE_BYTES} B * {length}^2"
        f" tokens = {format_bytes(needed)} of scores a rank",
        expected=f"samples of at most {DENSE_ATTENTION_TOKENS} tokens with that backend",
        fix="Set dsa-attention-backend to tilelang, with qkv-format thd.",
    )


def _sequence_format(spec: JobSpec) -> Iterator[Verdict]:
    keys = ("engine.miles.extra_args", "train.recompute", "train.max_tokens_per_gpu")
    flags = Flags(spec)
    layout, attention = flags.value("qkv-format"), flags.value("dsa-attention-backend")
    if attention == "tilelang" and layout not in (None, "thd"):
        yield Verdict(
            keys=keys[:1],
            found=f'dsa-attention-backend tilelang with qkv-format "{layout}"',
            expected='"thd", the packed layout that the tilelang kernels read',
            fix='Set qkv-format = "thd".',
        )
    if layout != "bshd":
        return
    if spec.train.max_tokens_per_gpu is not None:
        yield Verdict(
            keys=(keys[2], keys[0]),
            found=f'qkv-format "bshd" with max_tokens_per_gpu({spec.train.max_tokens_per_gpu})',
            expected="fixed micro-batches: padded rows cannot be packed to a token budget",
            fix="Set train.micro_batch_size instead.",
        )
    if spec.model.family == "glm_dsa" and spec.lora is not None and spec.train.recompute != "none":
        yield Verdict(
            keys=(keys[1], keys[0]),
            found=f'qkv-format "bshd" with recompute = "{spec.train.recompute}" and LoRA on GLM',
            expected="no recomputation there: it would read the top-k of another layer, which is stale by then",
            fix='Set qkv-format = "thd" with dsa-attention-backend = "tilelang", or train.recompute = "none".',
        )


def _attention_replicas(spec: JobSpec) -> Iterator[Verdict]:
    is_shared = spec.rollout.own_gpus is None
    if spec.lora is not None and is_shared and Flags(spec).value("sglang-enable-dp-attention"):
        yield Verdict(
            keys=("engine.miles.extra_args", "lora"),
            found="sglang-enable-dp-attention with LoRA on shared GPUs",
            expected="one attention group: its collectives in every iteration get out of step during a weight sync",
            fix="Remove sglang-enable-dp-attention.",
        )


def _known(spec: JobSpec) -> Iterator[Verdict]:
    engine = spec.engine.miles
    if engine is None:
        return
    raw = {flag.name: flag.key for flag in Flags(spec).all}
    rendered = {word.removeprefix("--") for word in train_flags(spec) if word.startswith("--")}
    for name in sorted({*raw, *rendered}):
        base = name.removeprefix("no-")
        key = raw.get(name) or OWNED.get(base, "engine.miles.revision")
        if base in NOT_EXPOSED:
            yield _unknown(
                engine.revision,
                name,
                key,
                "a flag that Miles passes on to SGLang; no revision passes on this one",
                "Remove it.",
            )
        elif is_lacking(engine.revision, name):
            yield _unknown(
                engine.revision,
                name,
                key,
                "a flag that its driver has; argparse ends the run at one that it does not know",
                f"Remove it, or name a revision that has it: {', '.join(revisions_with(base))}.",
            )


def _unknown(revision: str, name: str, key: str, expected: str, fix: str) -> Verdict:
    return Verdict(
        keys=tuple(dict.fromkeys((key, "engine.miles.revision"))),
        found=f"--{name} with Miles {revision[:9]}",
        expected=expected,
        fix=fix,
    )


MILES_CHECKS = (
    Check(
        Rule(
            id="MH551",
            fixed=True,
            title="weights that Miles can load",
            reason="Both sides of Miles load checkpoint folders.",
            source=f"{_MILES} train.py",
        ),
        _weights,
    ),
    Check(
        Rule(
            id="MH552",
            title="weights for both sides",
            reason="Megatron trains bf16 weights and cannot load a quantised checkpoint; the engine serves the quantised one.",
            source=f"{_MILES} docs/models/qwen/qwen3-8.md; examples/swe-agent-harbor-docker (sglang config, model_path)",
        ),
        _native_rollout_type,
    ),
    Check(
        Rule(
            id="MH553",
            title="no second booking of host memory",
            reason="Some switches keep a whole copy of the model in host memory for something that nobody reads.",
            arithmetic="indexer replay: 78 to 128 GB a rank;"
            " check-weight-update-equal: the base sent again at every step",
            source=f"{_MILES} miles/backends/megatron_utils/update_weight/update_weight_from_tensor.py:251; docs/models/qwen/qwen3-8.md",
        ),
        _agrees,
    ),
    Check(
        Rule(
            id="MH554",
            title="sparse attention that stays sparse",
            reason="Megatron's own backend for GLM's sparse attention keeps the scores of every pair of tokens for backward.",
            arithmetic="num_layers * heads a rank * 6 B * tokens^2: 59 GiB at 4096 tokens, 234 GiB at 8192 (GLM-5.2, tp 8)",
            source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py (dsa_attention_backend)",
        ),
        _dense_attention,
    ),
    Check(
        Rule(
            id="MH555",
            title="a sequence layout that its users can read",
            reason="Packed sequences (thd) and padded rows (bshd) suit different kernels and schedules.",
            arithmetic="tilelang needs thd; bshd needs micro_batch_size, and no recomputation on GLM with LoRA",
            source=f"{_MILES} miles/utils/arguments.py; run_glm52_lora_tb2_daytona.py (qkv_format)",
        ),
        _sequence_format,
    ),
    Check(
        Rule(
            id="MH556",
            title="no data-parallel attention under LoRA weight sync",
            reason="With data-parallel attention an engine's ranks meet in a collective at every iteration; a weight sync on"
            " shared GPUs stops some of them, and all wait for ever.",
            source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py (dp-attention off)",
        ),
        _attention_replicas,
    ),
    Check(
        Rule(
            id="MH563",
            title="flags that the revision has",
            reason="Flags differ between revisions of Miles; one that is unknown ends the driver minutes after the nodes came"
            " up. The head node looks again, at the checkout itself.",
            source="docs/reference/miles-revisions.md",
        ),
        _known,
    ),
)
