"""What the native engine needs: its driver's command and the limits of what it can train.

Knows nothing of how it trains; that is `miles_hpc.trainer`, which this package must not import.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

FAMILIES = ("llama", "qwen3")
_SOURCE = "miles_hpc/trainer"


def driver_argv(python: str) -> tuple[str, ...]:
    """Return the driver's command; `{run_dir}` is filled on the head node."""
    return (python, "-m", "miles_hpc.trainer", "{run_dir}")


def _model(spec: JobSpec) -> Iterator[Verdict]:
    model = spec.model
    if model.family not in FAMILIES:
        yield Verdict(
            keys=("model.family", "job.engine"),
            found=f'family "{model.family}" with the native engine',
            expected=f"one of {', '.join(FAMILIES)}",
            fix='Set job.engine = "miles".',
        )
    elif model.num_experts is not None or model.num_mtp_layers:
        what = "experts" if model.num_experts is not None else "multi-token-prediction layers"
        yield Verdict(
            keys=("model.num_experts", "model.num_mtp_layers", "job.engine"),
            found=f"a model with {what}",
            expected="a dense decoder for the native engine",
            fix='Set job.engine = "miles".',
        )
    if model.megatron_checkpoint is not None:
        yield Verdict(
            keys=("model.megatron_checkpoint", "job.engine"),
            found="megatron_checkpoint with the native engine",
            expected="the trainer to load hf_checkpoint itself",
            fix="Remove model.megatron_checkpoint.",
        )


def _rollout(spec: JobSpec) -> Iterator[Verdict]:
    rollout, device = spec.rollout, spec.cluster.device
    if rollout.engine == "transformers":
        if device == "gpu":
            yield Verdict(
                keys=("rollout.engine", "cluster.device"),
                found='rollout.engine = "transformers" on GPUs',
                expected='"sglang" on GPUs; transformers generates one token at a time without a paged cache',
                fix='Set rollout.engine = "sglang".',
            )
        if rollout.gpus_per_engine > 1:
            yield Verdict(
                keys=("rollout.gpus_per_engine", "rollout.engine"),
                found=f"gpus_per_engine({rollout.gpus_per_engine}) with transformers",
                expected="1: a transformers engine is one process",
                fix="Set rollout.gpus_per_engine = 1.",
            )
    if rollout.top_p < 1:
        yield Verdict(
            keys=("rollout.top_p",),
            found=f"top_p = {rollout.top_p:g}",
            expected="1: with a cut-off the engine's logprobs are those of another distribution than the trainer's, and"
            " their agreement is asserted at every step",
            fix="Remove rollout.top_p.",
        )


def _train(spec: JobSpec) -> Iterator[Verdict]:
    if spec.lora is not None and spec.lora.dropout > 0:
        yield Verdict(
            keys=("lora.dropout",),
            found=f"dropout = {spec.lora.dropout:g}",
            expected="0: with dropout the trainer's logprobs are not those of the weights that it sends",
            fix="Remove lora.dropout.",
        )
    if spec.train.optimizer_cpu_offload:
        yield Verdict(
            keys=("train.optimizer_cpu_offload", "job.engine"),
            found="optimizer_cpu_offload with the native engine",
            expected="the optimizer state to sleep with the trainer (offload.train)",
            fix="Remove train.optimizer_cpu_offload.",
        )
    if spec.data.source != "reasoning_gym":
        yield Verdict(
            keys=("data.source", "job.engine"),
            found=f'source "{spec.data.source}" with the native engine',
            expected='"reasoning_gym"',
            fix='Set data.source = "reasoning_gym" and data.task.',
        )


def _dtypes(spec: JobSpec) -> Iterator[Verdict]:
    model, native = spec.model, spec.engine.native
    if (
        spec.cluster.device == "cpu"
        and native is not None
        and model.train_dtype != native.cpu_dtype
    ):
        yield Verdict(
            keys=("model.train_dtype", "engine.native.cpu_dtype"),
            found=f'train_dtype "{model.train_dtype}" and cpu_dtype "{native.cpu_dtype}"',
            expected="the same type on CPU, where both sides hold their weights in cpu_dtype",
            fix=f'Set model.train_dtype = "{native.cpu_dtype}".',
        )
    if model.rollout_quantisation != model.train_dtype:
        yield Verdict(
            keys=("model.rollout_quantisation", "model.train_dtype"),
            found=f'rollout_quantisation "{model.rollout_quantisation}" and train_dtype "{model.train_dtype}"',
            expected="the native engine to hold both sides in one type, since it asserts that their logprobs agree",
            fix=f'Set model.rollout_quantisation = "{model.train_dtype}".',
        )


NATIVE_CHECKS = (
    Check(
        Rule(
            id="MH501",
            title="a model that the native engine knows",
            reason="The native engine loads and exports dense Llama and Qwen3 decoders from Hugging Face files, exactly.",
            source=_SOURCE,
        ),
        _model,
    ),
    Check(
        Rule(
            id="MH502",
            title="rollout whose logprobs the trainer can repeat",
            reason="The native engine asserts at every step that trainer and rollout agree on the logprob of every token.",
            source=_SOURCE,
        ),
        _rollout,
    ),
    Check(
        Rule(
            id="MH503",
            title="an update that the native engine can make",
            reason="It trains by GRPO on verifiable tasks and keeps its optimizer state beside the weights.",
            source=_SOURCE,
        ),
        _train,
    ),
    Check(
        Rule(
            id="MH504",
            title="one type on both sides",
            reason="Two roundings of the same weights disagree by more than the agreement that is asserted.",
            arithmetic="rollout_quantisation = train_dtype; on CPU train_dtype = cpu_dtype",
            source=_SOURCE,
        ),
        _dtypes,
    ),
)
