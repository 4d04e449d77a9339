"""How decoder layers are dealt to pipeline stages.

Pure arithmetic; knows nothing of what a layer holds, but for the sparse-attention layers that a stage may start on.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"
_MCORE = "megatron-core 0.16.1"


def stage_layers(spec: JobSpec) -> tuple[int, ...]:
    """Return the decoder layers of each pipeline stage, for a split that MH206 accepts."""
    parallel = spec.parallel
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    stages: list[int | None] = [None] * parallel.pp
    if parallel.pp > 1 and first is not None:
        stages[0] = first
    if parallel.pp > 1 and last is not None:
        stages[-1] = last
    open_stages = stages.count(None)
    rest = spec.model.num_layers - sum(count for count in stages if count is not None)
    return tuple(count if count is not None else rest // open_stages for count in stages)


def _pipeline_split(spec: JobSpec) -> Iterator[Verdict]:
    p, layers = spec.parallel, spec.model.num_layers
    given = [count for count in (p.first_stage_layers, p.last_stage_layers) if count is not None]
    keys = (
        "parallel.pp",
        "parallel.first_stage_layers",
        "parallel.last_stage_layers",
        "model.num_layers",
    )
    if p.pp == 1:
        if given:
            yield Verdict(
                keys=keys[1:3],
                found=f"an uneven split ({' and '.join(map(str, given))} layers) with pp(1)",
                expected="no first_stage_layers and no last_stage_layers without pipeline stages",
                fix="Remove them, or set parallel.pp above 1.",
            )
        return
    open_stages, rest = p.pp - len(given), layers - sum(given)
    text = f"num_layers({layers})" + "".join(f" - {count}" for count in given)
    if open_stages == 0:
        if rest != 0:
            yield Verdict(
                keys=keys,
                found=f"{text} = {rest} layers left over for no stage",
                expected="first and last stage to hold all layers when pp is 2",
                fix=f"Set parallel.last_stage_layers = {layers - given[0]}."
                if given[0] < layers
                else "Lower first_stage_layers.",
            )
    elif rest < open_stages or rest % open_stages:
        yield Verdict(
            keys=keys,
            found=f"{text} = {rest} layers for {open_stages} equal stages, {rest} % {open_stages} = {rest % open_stages}",
            expected="the same whole number of layers, at least 1, on each of them",
            fix=_split_fix(layers, p.pp),
        )


def _split_fix(layers: int, pp: int) -> str:
    if pp > layers:
        return f"Set parallel.pp to at most {layers}."
    even = layers // pp
    last = layers - even * (pp - 1)
    if last == even:
        return "Remove parallel.first_stage_layers and parallel.last_stage_layers."
    if pp == 2:
        return f"Set parallel.first_stage_layers = {even} and parallel.last_stage_layers = {last}."
    return f"Set parallel.last_stage_layers = {last} (the others get {even} each), without first_stage_layers."


def _sparse_attention_starts(spec: JobSpec) -> Iterator[Verdict]:
    topk = spec.model.dsa_topk_layers
    if not topk or spec.parallel.pp == 1 or any(True for _ in _pipeline_split(spec)):
        return
    stages = stage_layers(spec)
    starts = [sum(stages[:index]) for index in range(len(stages))]
    wrong = [start for start in starts if start not in topk]
    if wrong:
        nearest = ", ".join(str(min(topk, key=lambda layer: abs(layer - start))) for start in wrong)
        yield Verdict(
            keys=(
                "parallel.first_stage_layers",
                "parallel.last_stage_layers",
                "parallel.pp",
                "model.dsa_topk_layers",
            ),
            found=f"pipeline stages of {'-'.join(map(str, stages))} layers start at layer {', '.join(map(str, wrong))}",
            expected="every stage to start on a layer that computes the sparse-attention top-k (model.dsa_topk_layers)",
            fix=f"Move the starts to {nearest} through first_stage_layers and last_stage_layers.",
        )


PIPELINE_CHECKS = (
    Check(
        Rule(
            id="MH208",
            fixed=True,
            title="a pipeline split that uses every layer once",
            reason="Stages hold equal numbers of decoder layers but for a first or last stage that the spec sizes itself.",
            arithmetic="(num_layers - first - last) % (pp - number of sized stages) = 0, at least 1 layer each;"
            " no sized stage when pp = 1; first + last = num_layers when pp = 2 and both are sized",
            source=f"{_MCORE} core/transformer/transformer_config.py; {_MILES} miles/utils/arguments.py",
        ),
        _pipeline_split,
    ),
    Check(
        Rule(
            id="MH209",
            fixed=True,
            title="stages start on a top-k layer",
            reason="With sparse attention shared across layers, a layer without its own top-k reads the one of an earlier"
            " layer, which must be on the same pipeline stage.",
            arithmetic="every stage's first layer (0-based) is in model.dsa_topk_layers; GLM-5.2, 78 layers:"
            " 18-20-20-20 is right, 20-20-20-18 is not",
            source=f"{_MILES} miles_plugins GLM DSA bridge; scripts/run_glm5_2_744b_a40b.py",
        ),
        _sparse_attention_starts,
    ),
)
