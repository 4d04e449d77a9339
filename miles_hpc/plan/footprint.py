"""Bytes of each thing that a job keeps in memory: of one trainer rank, of one GPU of a rollout engine.

Pure formulas, each with its source; what is awake when is `memory`. docs/memory.md holds the checks of these formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from miles_hpc.plan.batch import longest_sample_tokens, samples_per_step
from miles_hpc.plan.grid import rollout_size, world_size
from miles_hpc.plan.shape import (
    RankParams,
    count_adapters,
    count_params,
    count_stages,
    has_experts,
    has_full_attention,
)
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import ModelTable
from miles_hpc.units import Bytes

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
ROUTED_BYTES: Mapping[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp8": 1,
    "nvfp4": 0.5 + 1 / 16,
    "int4": 0.5 + 2 / 32,
}
"""Bytes of a quantised parameter with its scales: NVFP4 has one byte for 16, INT4 a 16-bit scale for 32."""
OTHER_BYTES: Mapping[str, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "nvfp4": 2, "int4": 2}
"""Bytes of a parameter outside the routed experts: four-bit checkpoints keep these in bf16."""
ADAM_BYTES = 12
"""Bytes of optimizer state for each parameter: fp32 main weight and two fp32 moments."""
GRADIENT_BYTES = 4
"""Bytes of a gradient: Megatron accumulates in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFootprint:
    """Bytes of one trainer rank of one pipeline stage.

    Attributes:
        weights: all weights of the rank, the frozen base included.
        trained: adapters with their gradients and, unless streamed, optimizer state; or gradients alone in full training.
        optimizer: optimizer state in full training, unless streamed; 0 with LoRA, whose state is in `trained`.
        streamed: optimizer state on scratch disk, with `offload.stream_optimizer`.
        activations: what forward keeps for backward, at its peak.
        logits: output scores of one micro-batch with their gradient; last stage only.
    """

    weights: Bytes
    trained: Bytes
    optimizer: Bytes
    streamed: Bytes
    activations: Bytes
    logits: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFootprint:
    """Bytes of a rollout engine on one of its GPUs.

    Attributes:
        weights: its part of the weights, quantised.
        cache_bytes_per_token: keys and values of one token.
        cache_needed: cache of the longest samples that run at once.
    """

    weights: Bytes
    cache_bytes_per_token: int
    cache_needed: Bytes


def rank_weight_bytes(spec: JobSpec, stage: RankParams) -> Bytes:
    """Return the weights of one rank: dtype * (routed / (ep * etp) + sharded / tp + replicated) of its stage.

    Source: for equal stages P_exp / (pp * ep * etp) + P_oth / (pp * tp); docs/memory.md, checked within 10 % of the
    published 390 GB a node (Qwen3.8) and 50 GiB a rank (GLM-5.2).
    """
    return Bytes((stage.routed + stage.others) * DTYPE_BYTES[spec.model.train_dtype])


def optimizer_bytes(spec: JobSpec, stage: RankParams) -> Bytes:
    """Return the optimizer state of one rank under the distributed optimizer, training all weights.

    12 bytes * (routed / edp + others / (dp * cp)). Source: docs/memory.md; 282 GB against the published 279 GB a rank of
    GLM-5.2 on 8 GB300 nodes.
    """
    parallel, world = spec.parallel, world_size(spec)
    edp = world // (parallel.etp * parallel.ep * parallel.pp)
    dp_cp = world // (parallel.tp * parallel.pp)
    return Bytes(round(ADAM_BYTES * (stage.routed / edp + stage.others / dp_cp)))


def adapter_bytes(spec: JobSpec) -> Bytes:
    """Return the most bytes of adapters, their fp32 gradients and, unless streamed, their optimizer state on one rank."""
    each = DTYPE_BYTES[spec.model.train_dtype] + GRADIENT_BYTES
    if not spec.offload.stream_optimizer:
        each += ADAM_BYTES
    return Bytes(count_adapters(spec) * each)


def optimizer_footprint(spec: JobSpec, stage: RankParams) -> tuple[Bytes, Bytes]:
    """Return one rank's optimizer state that is in memory beside `adapter_bytes`, and that on scratch disk."""
    if spec.lora is None:
        state = optimizer_bytes(spec, stage)
        return (Bytes(0), state) if spec.offload.stream_optimizer else (state, Bytes(0))
    streamed = count_adapters(spec) * ADAM_BYTES if spec.offload.stream_optimizer else 0
    return Bytes(0), Bytes(streamed)


def micro_batch_tokens(spec: JobSpec, longest: int | None = None) -> int:
    """Return the most tokens of one micro-batch on one context parallel rank.

    Args:
        spec: the spec.
        longest: tokens of the longest sample, when it is not prompt plus response (sessions of several turns).
    """
    tokens = longest_sample_tokens(spec) if longest is None else longest
    cp, budget = spec.parallel.cp, spec.train.max_tokens_per_gpu
    if budget is not None:
        return max(budget, -(-tokens // cp))
    return -(-tokens * (spec.train.micro_batch_size or 1) // cp)


def layer_activation_bytes(spec: JobSpec, layer: int, tokens: int) -> Bytes:
    """Return what one decoder layer keeps of `tokens` tokens for backward, without recomputation.

    Counts the inputs of norms, projections and the gated MLP in the weights' type; attention scores are not kept (fused
    attention). Tensor parallelism splits projections, and with sequence parallelism the norms' inputs too.

    Source: Korthikanti et al. 2022, section 4 (arXiv:2205.05198), with grouped heads, gated MLP and experts.
    """
    model, parallel = spec.model, spec.parallel
    if has_full_attention(model, layer):
        value = model.v_head_dim or model.head_dim
        heads, groups = model.num_attention_heads, model.num_query_groups
        projections = heads * (model.head_dim + value) + groups * (model.head_dim + value)
    else:
        projections = 4 * model.hidden_size  # a linear mixer's inputs: query, key, value, gate
    if has_experts(model, layer):
        visits = model.experts_per_token or 0
        inner = visits * (model.moe_ffn_hidden_size or 0)
        inner += model.shared_expert_ffn_hidden_size or 0
        projections += 3 * inner + 2 * visits * model.hidden_size  # dispatched and combined tokens
    else:
        projections += 3 * model.ffn_hidden_size
    residuals = 4 * model.hidden_size / (parallel.tp if parallel.sequence_parallel else 1)
    elements = tokens * (projections / parallel.tp + residuals)
    return Bytes(round(elements * DTYPE_BYTES[model.train_dtype]))


def activation_bytes(
    spec: JobSpec, stage: int, first_layer: int, layers: int, tokens: int
) -> Bytes:
    """Return the peak of kept activations on one rank of `stage`.

    A stage has `pp - stage` micro-batches in flight. Full recomputation keeps each layer's input and, for one layer at a
    time, everything.
    """
    parallel, model = spec.parallel, spec.model
    in_flight = parallel.pp - stage
    kept = [layer_activation_bytes(spec, first_layer + index, tokens) for index in range(layers)]
    if spec.train.recompute != "full":
        return Bytes(in_flight * sum(kept))
    inputs = tokens * model.hidden_size * DTYPE_BYTES[model.train_dtype]
    if parallel.sequence_parallel:
        inputs //= parallel.tp
    return Bytes(in_flight * layers * inputs + max(kept))


def logit_bytes(spec: JobSpec, tokens: int) -> Bytes:
    """Return the scores of one micro-batch: in the weights' type, in fp32, and their fp32 gradient."""
    model = spec.model
    each = DTYPE_BYTES[model.train_dtype] + 4 + 4
    return Bytes(tokens * -(-model.vocab_size // spec.parallel.tp) * each)


def trainer_footprints(
    spec: JobSpec, longest: int | None = None, gradient_bytes: int = GRADIENT_BYTES
) -> tuple[TrainerFootprint, ...]:
    """Return the footprint of one rank of each pipeline stage.

    Args:
        spec: the spec.
        longest: tokens of the longest sample, as for `micro_batch_tokens`.
        gradient_bytes: bytes of each gradient in full training.
    """
    tokens = micro_batch_tokens(spec, longest)
    adapters, footprints, first = adapter_bytes(spec), [], 0
    for index, stage in enumerate(count_stages(spec)):
        full = spec.lora is None
        gradients = Bytes((stage.routed + stage.others) * gradient_bytes)
        is_last = index == spec.parallel.pp - 1
        optimizer, streamed = optimizer_footprint(spec, stage)
        footprints.append(
            TrainerFootprint(
                weights=rank_weight_bytes(spec, stage),
                trained=gradients if full else adapters,
                optimizer=optimizer,
                streamed=streamed,
                activations=activation_bytes(spec, index, first, stage.layers, tokens),
                logits=logit_bytes(spec, tokens) if is_last else Bytes(0),
            )
        )
        first += stage.layers
    return tuple(footprints)


def engine_weight_bytes(spec: JobSpec) -> Bytes:
    """Return the weights of a rollout engine on one of its GPUs.

    (q_routed * P_exp + q_other * P_oth) / gpus_per_engine. Source: docs/memory.md; 351 to 357 GB against the published
    372 GB a node (Qwen3.8), 701 against 704 GiB (GLM-5.2).
    """
    params, kind = count_params(spec.model), spec.model.rollout_quantisation
    whole = ROUTED_BYTES[kind] * params.routed + OTHER_BYTES[kind] * params.others
    return Bytes(round(whole / spec.rollout.gpus_per_engine))


def cache_bytes_per_token(spec: JobSpec) -> int:
    """Return the key/value cache of one token on one GPU of an engine; groups are copied when there are fewer than GPUs.

    Latent attention caches one compressed vector, whole on every GPU. Linear mixers keep no cache that grows.
    """
    model, each = spec.model, _cache_dtype_bytes(spec.model)
    layers = sum(has_full_attention(model, layer) for layer in range(model.num_layers))
    if model.kv_lora_rank is not None:
        return layers * (model.kv_lora_rank + (model.qk_rope_head_dim or 0)) * each
    groups = max(1, -(-model.num_query_groups // spec.rollout.gpus_per_engine))
    return layers * 2 * groups * model.head_dim * each


def _cache_dtype_bytes(model: ModelTable) -> int:
    return 4 if model.rollout_quantisation == "fp32" else 2


def engine_footprint(spec: JobSpec) -> EngineFootprint:
    """Return the footprint of a rollout engine on one of its GPUs."""
    engines = max(1, rollout_size(spec) // spec.rollout.gpus_per_engine)
    samples = -(-samples_per_step(spec) // engines)
    running = min(samples, spec.rollout.max_running_requests or samples)
    per_token = cache_bytes_per_token(spec)
    return EngineFootprint(
        weights=engine_weight_bytes(spec),
        cache_bytes_per_token=per_token,
        cache_needed=Bytes(running * longest_sample_tokens(spec) * per_token),
    )
