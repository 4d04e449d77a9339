"""The batch rules: samples of a step, updates, micro-batches, and the length of a sample.

Pure arithmetic on the spec; the schedule of real lengths at run time is the engine's.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.grid import world_size
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"


def samples_per_step(spec: JobSpec) -> int:
    """Return the samples that one step generates."""
    return spec.rollout.prompts_per_step * spec.rollout.samples_per_prompt


def global_batch_size(spec: JobSpec) -> int:
    """Return the samples of one optimizer update; by default all of the step."""
    return spec.train.global_batch_size or samples_per_step(spec)


def micro_batch_size(spec: JobSpec) -> int | None:
    """Return the samples of one micro-batch; None when a token budget decides."""
    return None if spec.train.max_tokens_per_gpu is not None else spec.train.micro_batch_size or 1


def updates_per_step(spec: JobSpec) -> int:
    """Return the optimizer updates of one step, for a spec that MH231 accepts."""
    return samples_per_step(spec) // global_batch_size(spec)


def longest_sample_tokens(spec: JobSpec) -> int:
    """Return the tokens of the longest possible sample: prompt and response at their maxima."""
    return spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens


def _data_parallel(spec: JobSpec) -> int | None:
    parallel, world = spec.parallel, world_size(spec)
    dp, rest = divmod(world, parallel.tp * parallel.pp * parallel.cp)
    return dp if dp and not rest else None


def _near_divisors(number: int, near: int) -> str:
    divisors = [count for count in range(1, number + 1) if number % count == 0]
    below = max((count for count in divisors if count < near), default=None)
    above = min((count for count in divisors if count > near), default=None)
    return " or ".join(str(count) for count in (below, above) if count is not None)


def _whole_updates(spec: JobSpec) -> Iterator[Verdict]:
    samples, batch = samples_per_step(spec), global_batch_size(spec)
    if samples % batch:
        yield Verdict(
            keys=(
                "train.global_batch_size",
                "rollout.prompts_per_step",
                "rollout.samples_per_prompt",
            ),
            found=f"prompts_per_step({spec.rollout.prompts_per_step}) * samples_per_prompt"
            f"({spec.rollout.samples_per_prompt}) = {samples} samples, and {samples} % global_batch_size({batch})"
            f" = {samples % batch}",
            expected="a whole number of updates in a step",
            fix=f"Set train.global_batch_size = {_near_divisors(samples, batch)}.",
        )


def _static_batches(spec: JobSpec) -> Iterator[Verdict]:
    dp, micro, batch = _data_parallel(spec), micro_batch_size(spec), global_batch_size(spec)
    if dp is None or micro is None or batch % (dp * micro) == 0:
        return
    fits = batch // dp if batch % dp == 0 else None
    fix = (
        f"Set train.micro_batch_size = {_near_divisors(fits, micro)}."
        if fits is not None
        else f"Set train.global_batch_size to a multiple of {dp * micro}."
    )
    yield Verdict(
        keys=("train.micro_batch_size", "train.global_batch_size", "cluster.num_nodes"),
        found=f"global_batch_size({batch}) % (dp({dp}) * micro_batch_size({micro}) = {dp * micro})"
        f" = {batch % (dp * micro)}",
        expected="the same number of full micro-batches on every replica",
        fix=fix,
    )


def _dynamic_batches(spec: JobSpec) -> Iterator[Verdict]:
    dp, budget = _data_parallel(spec), spec.train.max_tokens_per_gpu
    if budget is None or dp is None:
        return
    batch, longest, cp = global_batch_size(spec), longest_sample_tokens(spec), spec.parallel.cp
    if batch < dp:
        yield Verdict(
            keys=("train.global_batch_size", "cluster.num_nodes"),
            found=f"global_batch_size({batch}) below dp({dp})",
            expected="at least one sample for every replica",
            fix=f"Set train.global_batch_size to {dp} or more.",
        )
    if longest > budget * cp:
        yield Verdict(
            keys=("train.max_tokens_per_gpu", "rollout.max_response_tokens"),
            found=f"max_prompt_tokens + max_response_tokens = {longest} above max_tokens_per_gpu({budget}) * cp({cp})"
            f" = {budget * cp}",
            expected="the longest sample to fit the token budget; a longer one is a micro-batch of its own, over budget",
            fix=f"Set train.max_tokens_per_gpu = {-(-longest // cp)}, or plan memory for the longest sample.",
            level="warning",
        )


def _group_size(spec: JobSpec) -> Iterator[Verdict]:
    if spec.rollout.samples_per_prompt == 1:
        yield Verdict(
            keys=("rollout.samples_per_prompt",),
            found="samples_per_prompt = 1",
            expected="at least 2: the advantage is the reward less the group's mean, which is 0 in a group of one",
            fix="Set rollout.samples_per_prompt = 8.",
        )


def _sample_length(spec: JobSpec) -> Iterator[Verdict]:
    longest, positions = longest_sample_tokens(spec), spec.model.max_position_embeddings
    rollout = spec.rollout
    text = (
        f"max_prompt_tokens({rollout.max_prompt_tokens}) + max_response_tokens({rollout.max_response_tokens})"
        f" = {longest}"
    )
    if longest > positions:
        yield Verdict(
            keys=(
                "rollout.max_response_tokens",
                "rollout.max_prompt_tokens",
                "model.max_position_embeddings",
            ),
            found=f"{text}, above max_position_embeddings({positions})",
            expected="samples no longer than the model's positions",
            fix=f"Lower one of them by {longest - positions}.",
        )
    if rollout.context_length is not None and longest > rollout.context_length:
        yield Verdict(
            keys=("rollout.context_length", "rollout.max_response_tokens"),
            found=f"{text}, above context_length({rollout.context_length})",
            expected="an engine that accepts the longest sample; it would refuse the request",
            fix=f"Set rollout.context_length = {longest}, or remove it.",
        )


BATCH_CHECKS = (
    Check(
        Rule(
            id="MH231",
            fixed=True,
            title="whole updates in a step",
            reason="A step's samples are dealt into optimizer updates of equal size; what is left over would be dropped.",
            arithmetic="global_batch_size = prompts_per_step * samples_per_prompt / updates",
            source=f"{_MILES} miles/utils/arguments.py (global_batch_size), miles/utils/dp_schedule.py",
        ),
        _whole_updates,
    ),
    Check(
        Rule(
            id="MH233",
            fixed=True,
            title="equal micro-batches on every replica",
            reason="With fixed micro-batches every replica runs the same number of them, or the pipeline and the gradient"
            " all-reduce would wait for ever.",
            arithmetic="global_batch_size % (dp * micro_batch_size) = 0",
            source=f"{_MILES} miles/utils/dp_schedule.py (static schedule)",
        ),
        _static_batches,
    ),
    Check(
        Rule(
            id="MH234",
            title="a token budget that samples fit",
            reason="Dynamic batching packs samples up to the budget; every replica needs at least one micro-batch, and a"
            " sample longer than the budget is packed alone, above it.",
            arithmetic="global_batch_size >= dp (error); max_prompt_tokens + max_response_tokens <="
            " max_tokens_per_gpu * cp (warning)",
            source=f"{_MILES} miles/utils/dp_schedule.py (dynamic schedule)",
        ),
        _dynamic_batches,
    ),
    Check(
        Rule(
            id="MH235",
            title="groups of more than one",
            reason="GRPO compares the samples of one prompt with each other.",
            arithmetic="samples_per_prompt >= 2",
            source="Shao et al. 2024, arXiv:2402.03300, section 4.1",
        ),
        _group_size,
    ),
    Check(
        Rule(
            id="MH236",
            title="samples that fit the model and the engine",
            reason="Positions beyond the trained range give garbage, and an engine refuses requests above its context.",
            arithmetic="max_prompt_tokens + max_response_tokens <= min(max_position_embeddings, context_length)",
            source="model config.json max_position_embeddings; SGLang --context-length",
        ),
        _sample_length,
    ),
)
