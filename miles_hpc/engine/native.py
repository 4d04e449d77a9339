"""What the native engine needs: its driver's command and the limits of what it can train.

Knows nothing of how it trains; that is `miles_hpc.trainer`, which this package must not import.
"""

from collections.abc import Iterator

from miles_hpc.handoff import SaveTrigger
from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.sides import EngineTraits
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_SOURCE = "miles_hpc/trainer"


SAVE_TRIGGER = SaveTrigger(path="{attempt_dir}/requests/save_and_stop.json", done="exit")
"""The request itself: the driver reads it at the borders of its phases."""


def driver_argv(python: str) -> tuple[str, ...]:
    """Return the driver's command; `{run_dir}` is filled on the head node."""
    return (python, "-m", "miles_hpc.trainer", "{run_dir}")


def memory_traits() -> EngineTraits:
    """Return what the native engine keeps in memory: no copy but the sleeping side's own."""
    return EngineTraits()


def _model(spec: JobSpec) -> Iterator[Verdict]:
    model = spec.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.num_mtp_layers:
        yield Verdict(
            keys=("model.num_mtp_layers", "job.engine"),
            found=f"num_mtp_layers = {model.num_mtp_layers} with the native engine",
            expected="a decoder without multi-token-prediction layers",
            fix='Set model.num_mtp_layers = 0, or job.engine = "miles".',
        )
    if model.attention_bias:
        yield Verdict(
            keys=("model.attention_bias", "job.engine"),
            found="attention_bias = true with the native engine",
            expected="attention projections without biases",
            fix='Set job.engine = "miles".',
        )
    if heads % groups:
        yield Verdict(
            keys=("model.num_attention_heads", "model.num_query_groups"),
            found=f"num_attention_heads({heads}) % num_query_groups({groups}) = {heads % groups}",
            expected="every key/value group to serve the same number of heads",
            fix="Correct the shape from the model's config.json.",
        )


def _grid(spec: JobSpec) -> Iterator[Verdict]:
    if spec.parallel.cp > 1:
        yield Verdict(
            keys=("parallel.cp", "job.engine"),
            found=f"cp({spec.parallel.cp}) with the native engine",
            expected="1: it does not split a sequence over ranks",
            fix="Set parallel.cp = 1.",
        )
    if spec.rollout.engine == "transformers" and spec.rollout.gpus_per_engine > 1:
        yield Verdict(
            keys=("rollout.gpus_per_engine", "rollout.engine"),
            found=f"gpus_per_engine({spec.rollout.gpus_per_engine}) with transformers",
            expected="1: a transformers engine is one process",
            fix="Set rollout.gpus_per_engine = 1.",
        )


def _adapters(spec: JobSpec) -> Iterator[Verdict]:
    if spec.lora is None:
        yield Verdict(
            keys=("lora", "job.engine"),
            found="no [lora] table with the native engine",
            expected="adapters: it trains them over a frozen base and syncs nothing else",
            fix="Add [lora] with rank and alpha.",
        )


def _dtypes(spec: JobSpec) -> Iterator[Verdict]:
    model, native = spec.model, spec.engine.native
    cpu_dtype = "fp32" if native is None else native.cpu_dtype
    if spec.cluster.device == "cpu" and model.train_dtype != cpu_dtype:
        yield Verdict(
            keys=("model.train_dtype", "engine.native.cpu_dtype"),
            found=f'train_dtype "{model.train_dtype}" and cpu_dtype "{cpu_dtype}"',
            expected="the same type on CPU, where both sides hold their weights in cpu_dtype",
            fix=f'Set model.train_dtype = "{cpu_dtype}".',
        )
    if model.rollout_quantisation != model.train_dtype:
        yield Verdict(
            keys=("model.rollout_quantisation", "model.train_dtype"),
            found=f'rollout_quantisation "{model.rollout_quantisation}" and train_dtype "{model.train_dtype}"',
            expected="both sides in one type, since the agreement of their logprobs is asserted at every step",
            fix=f'Set model.rollout_quantisation = "{model.train_dtype}".',
        )


NATIVE_CHECKS = (
    Check(
        Rule(
            id="MH501",
            fixed=True,
            title="a model that the native engine knows",
            reason="The native engine loads dense Llama and Qwen3 decoders from Hugging Face files and exports them again,"
            " exactly; it has no weights for what such files do not hold.",
            arithmetic="num_attention_heads % num_query_groups = 0",
            source=_SOURCE,
        ),
        _model,
    ),
    Check(
        Rule(
            id="MH502",
            fixed=True,
            title="a grid that the native engine runs",
            reason="It trains with tensor, pipeline and data parallelism; a transformers engine is one process.",
            arithmetic="cp = 1; gpus_per_engine = 1 with transformers",
            source=_SOURCE,
        ),
        _grid,
    ),
    Check(
        Rule(
            id="MH503",
            fixed=True,
            title="adapters for the native engine",
            reason="The native engine trains adapters over a frozen base; the adapter is all that travels to the rollout.",
            source=_SOURCE,
        ),
        _adapters,
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
