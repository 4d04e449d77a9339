"""Whether a model's heads, experts and widths divide over the tensor and expert parallel ranks.

Pure arithmetic on one axis at a time; layers over pipeline stages are `pipeline`.
"""

from collections.abc import Iterator
from math import gcd

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import LATENT_FAMILIES
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"
_MCORE = "megatron-core 0.16.1"


def _heads(spec: JobSpec) -> Iterator[Verdict]:
    heads, tp = spec.model.num_attention_heads, spec.parallel.tp
    if heads % tp:
        yield Verdict(
            keys=("parallel.tp", "model.num_attention_heads"),
            found=f"num_attention_heads({heads}) % tp({tp}) = {heads % tp}",
            expected="whole heads on each tensor parallel rank",
            fix=f"Set parallel.tp to one of {_divisors_text(heads)}.",
        )


def _query_groups(spec: JobSpec) -> Iterator[Verdict]:
    groups, tp = spec.model.num_query_groups, spec.parallel.tp
    if spec.model.family in LATENT_FAMILIES:
        return  # multi-head latent attention has one compressed key/value, replicated over tensor parallel ranks
    native = spec.job.engine == "native" or spec.lora is not None
    if groups % tp == 0 or (not native and tp % groups == 0):
        return
    who = "the native engine" if spec.job.engine == "native" else "Miles' native LoRA"
    rule = f"num_query_groups % tp = 0 for {who}" if native else "one to divide the other"
    yield Verdict(
        keys=("parallel.tp", "model.num_query_groups"),
        found=f"num_query_groups({groups}) and tp({tp}): {groups} % {tp} = {groups % tp}",
        expected=rule,
        fix=f"Set parallel.tp to one of {_divisors_text(gcd(groups, spec.model.num_attention_heads))}.",
    )


def _experts(spec: JobSpec) -> Iterator[Verdict]:
    model, p = spec.model, spec.parallel
    if model.num_experts is None:
        if p.ep > 1 or p.etp > 1:
            yield Verdict(
                keys=("parallel.ep", "parallel.etp", "model.num_experts"),
                found=f"ep({p.ep}) and etp({p.etp}) with a dense model",
                expected="both 1 without experts",
                fix="Remove parallel.ep and parallel.etp, or give model.num_experts.",
            )
        return
    if model.num_experts % p.ep:
        yield Verdict(
            keys=("parallel.ep", "model.num_experts"),
            found=f"num_experts({model.num_experts}) % ep({p.ep}) = {model.num_experts % p.ep}",
            expected="whole experts on each expert parallel rank",
            fix=f"Set parallel.ep to one of {_divisors_text(model.num_experts)}.",
        )
    width = model.moe_ffn_hidden_size
    if width is not None and width % p.etp:
        yield Verdict(
            keys=("parallel.etp", "model.moe_ffn_hidden_size"),
            found=f"moe_ffn_hidden_size({width}) % etp({p.etp}) = {width % p.etp}",
            expected="equal slices of an expert's inner width",
            fix="Set parallel.etp = 1.",
        )


def _widths(spec: JobSpec) -> Iterator[Verdict]:
    tp, width = spec.parallel.tp, spec.model.ffn_hidden_size
    if width % tp:
        yield Verdict(
            keys=("parallel.tp", "model.ffn_hidden_size"),
            found=f"ffn_hidden_size({width}) % tp({tp}) = {width % tp}",
            expected="equal slices of the MLP's inner width",
            fix=f"Set parallel.tp to one of {_divisors_text(gcd(width, spec.model.num_attention_heads))}.",
        )


def _sequence_parallel(spec: JobSpec) -> Iterator[Verdict]:
    p = spec.parallel
    if p.sequence_parallel and p.tp == 1:
        yield Verdict(
            keys=("parallel.sequence_parallel", "parallel.tp"),
            found="sequence_parallel = true with tp(1)",
            expected="tp above 1 for it to have an effect",
            fix="Remove parallel.sequence_parallel.",
            level="warning",
        )
    if spec.model.num_experts is not None and p.tp > 1 and not p.sequence_parallel:
        yield Verdict(
            keys=("parallel.sequence_parallel", "parallel.tp"),
            found=f"a mixture-of-experts model with tp({p.tp}) and sequence_parallel = false",
            expected="sequence parallelism whenever experts train under tensor parallelism",
            fix="Set parallel.sequence_parallel = true.",
        )


def _divisors_text(number: int) -> str:
    divisors = [count for count in range(1, number + 1) if number % count == 0]
    return ", ".join(map(str, divisors if len(divisors) <= 12 else divisors[:12])) + (
        "" if len(divisors) <= 12 else ", ..."
    )


DIVISION_CHECKS = (
    Check(
        Rule(
            id="MH204",
            fixed=True,
            title="whole attention heads on a rank",
            reason="Tensor parallelism splits attention by heads.",
            arithmetic="num_attention_heads % tp = 0",
            source=f"{_MCORE} core/transformer/transformer_config.py __post_init__",
        ),
        _heads,
    ),
    Check(
        Rule(
            id="MH205",
            fixed=True,
            title="whole key/value groups on a rank",
            reason="Megatron copies a group to several ranks when tp exceeds the groups; the adapters of the native engine"
            " and of Miles' native LoRA do not know such copies.",
            arithmetic="num_query_groups % tp = 0; without LoRA under Miles also tp % num_query_groups = 0;"
            " models with multi-head latent attention are exempt",
            source=f"{_MCORE} core/transformer/transformer_config.py __post_init__; {_MILES} native LoRA",
        ),
        _query_groups,
    ),
    Check(
        Rule(
            id="MH206",
            fixed=True,
            title="equal slices of the MLP",
            reason="Tensor parallelism splits the inner width of a dense MLP.",
            arithmetic="ffn_hidden_size % tp = 0",
            source=f"{_MCORE} core/tensor_parallel/layers.py divide",
        ),
        _widths,
    ),
    Check(
        Rule(
            id="MH207",
            fixed=True,
            title="whole experts on a rank",
            reason="Expert parallelism deals out whole experts, and a dense model has none to deal out.",
            arithmetic="num_experts % ep = 0; moe_ffn_hidden_size % etp = 0; ep = etp = 1 without experts",
            source=f"{_MCORE} core/transformer/moe/moe_layer.py",
        ),
        _experts,
    ),
    Check(
        Rule(
            id="MH210",
            title="sequence parallelism where it belongs",
            reason="Megatron switches sequence parallelism off without a word when tp is 1, and refuses to train experts"
            " under tensor parallelism without it.",
            arithmetic="sequence_parallel needs tp > 1 (warning); experts and tp > 1 need sequence_parallel (error)",
            source=f"{_MCORE} core/transformer/moe/moe_layer.py forward; Megatron-LM training/arguments.py",
        ),
        _sequence_parallel,
    ),
)
