"""Parameters of a model by how they are split over ranks, counted from the [model] table.

Counts only; bytes are `footprint`. A model whose shape does not give all parameters (linear mixers, sparse-attention
indexers, vision towers) has the rest in `unlisted`, from `model.total_params`.
"""

from dataclasses import dataclass

from miles_hpc.plan.pipeline import stage_layers
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import LINEAR_FAMILIES, ModelTable

_GATED = 3
"""Matrices of a gated MLP: gate, up, down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Parameters of one decoder layer.

    Attributes:
        sharded: split over tensor parallel ranks.
        replicated: whole on every tensor parallel rank (routers, norms, latent down-projections).
        routed: routed experts, split over expert parallel and expert tensor parallel ranks.
    """

    sharded: int
    replicated: int
    routed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """Parameters of the whole model.

    Attributes:
        routed: all routed experts.
        listed: all parameters that the shape gives, routed experts included.
        unlisted: `model.total_params` less `listed`; 0 when the total is not given.
    """

    routed: int
    listed: int
    unlisted: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.listed + self.unlisted

    @property
    def others(self) -> int:
        """All but the routed experts."""
        return self.total - self.routed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParams:
    """Parameters that one trainer rank of a pipeline stage holds.

    Attributes:
        routed: of routed experts.
        others: of all the rest.
        layers: decoder layers on the stage.
    """

    routed: int
    others: int
    layers: int


def has_full_attention(model: ModelTable, layer: int) -> bool:
    """Tell whether `layer` (0-based) has full attention; else its mixer is among the unlisted parameters."""
    interval = model.full_attention_interval
    return interval is None or layer % interval == interval - 1


def has_experts(model: ModelTable, layer: int) -> bool:
    """Tell whether `layer` (0-based) has routed experts instead of a dense MLP."""
    return model.num_experts is not None and layer >= model.num_dense_layers


def count_layer(model: ModelTable, layer: int) -> LayerParams:
    """Return the parameters of decoder layer `layer` (0-based)."""
    hidden = model.hidden_size
    sharded, replicated = _attention(model) if has_full_attention(model, layer) else (0, 0)
    replicated += 2 * hidden
    routed = 0
    if has_experts(model, layer):
        routed = (model.num_experts or 0) * _GATED * hidden * (model.moe_ffn_hidden_size or 0)
        sharded += _GATED * hidden * (model.shared_expert_ffn_hidden_size or 0)
        replicated += hidden * (model.num_experts or 0)
    else:
        sharded += _GATED * hidden * model.ffn_hidden_size
    return LayerParams(sharded=sharded, replicated=replicated, routed=routed)


def _attention(model: ModelTable) -> tuple[int, int]:
    """Return sharded and replicated parameters of one attention layer."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank is not None:
        rope, value = model.qk_rope_head_dim or 0, model.v_head_dim or model.head_dim
        query_rank, cache_rank = model.q_lora_rank or 0, model.kv_lora_rank
        sharded = query_rank * heads * (model.head_dim + rope)
        sharded += cache_rank * heads * (model.head_dim + value) + heads * value * hidden
        return sharded, hidden * (query_rank + cache_rank + rope)
    query = heads * model.head_dim
    gates = query if model.family in LINEAR_FAMILIES else 0  # its attention gates its output
    keys = 2 * model.num_query_groups * model.head_dim
    norms = 2 * model.head_dim if model.qk_layernorm else 0
    return hidden * (2 * query + gates + keys), norms


def embedding_params(model: ModelTable) -> int:
    """Return the parameters of the embedding matrix, which are also those of the output layer."""
    return model.vocab_size * model.hidden_size


def count_params(model: ModelTable) -> ModelParams:
    """Return the parameters of `model`."""
    layers = [count_layer(model, layer) for layer in range(model.num_layers)]
    routed = sum(layer.routed for layer in layers)
    matrices = 1 if model.tie_word_embeddings else 2
    listed = routed + model.hidden_size + matrices * embedding_params(model)
    listed += sum(layer.sharded + layer.replicated for layer in layers)
    unlisted = 0 if model.total_params is None else max(0, model.total_params - listed)
    return ModelParams(routed=routed, listed=listed, unlisted=unlisted)


def count_stages(spec: JobSpec) -> tuple[RankParams, ...]:
    """Return what one rank of each pipeline stage holds.

    Unlisted parameters are dealt to stages by their layers and split over tensor parallel ranks.
    """
    model, parallel = spec.model, spec.parallel
    unlisted = count_params(model).unlisted / model.num_layers
    stages, start = [], 0
    for stage, num_layers in enumerate(stage_layers(spec)):
        layers = [count_layer(model, layer) for layer in range(start, start + num_layers)]
        start += num_layers
        sharded = sum(layer.sharded for layer in layers) + unlisted * num_layers
        if stage == 0:
            sharded += embedding_params(model)
        if stage == parallel.pp - 1 and (parallel.pp > 1 or not model.tie_word_embeddings):
            sharded += embedding_params(
                model
            )  # a last stage of its own has a copy even of tied weights
        stages.append(
            RankParams(
                routed=round(sum(layer.routed for layer in layers) / (parallel.ep * parallel.etp)),
                others=round(sharded / parallel.tp) + sum(layer.replicated for layer in layers),
                layers=num_layers,
            )
        )
    return tuple(stages)


def count_adapters(spec: JobSpec) -> int:
    """Return the most adapter parameters that one rank holds; 0 without LoRA.

    An adapter on a projection of `inputs` by `outputs` has rank * (inputs + outputs); the half that tensor parallelism
    would split is counted whole, so that this is an upper bound.
    """
    if spec.lora is None:
        return 0
    most, start = 0, 0
    for num_layers in stage_layers(spec):
        stage = sum(_layer_adapters(spec, layer) for layer in range(start, start + num_layers))
        most, start = max(most, stage), start + num_layers
    return most


def _layer_adapters(spec: JobSpec, layer: int) -> int:
    if spec.lora is None:
        return 0
    model, targets = spec.model, spec.lora.target_modules
    widths = 0
    if has_full_attention(model, layer):
        widths += sum(_attention_widths(model).get(name, 0) for name in targets)
    mlps = [name for name in targets if name in ("gate_proj", "up_proj", "down_proj")]
    if has_experts(model, layer):
        local = (model.num_experts or 0) // spec.parallel.ep
        routed = local * (model.hidden_size + (model.moe_ffn_hidden_size or 0))
        widths += len(mlps) * (
            routed + model.hidden_size + (model.shared_expert_ffn_hidden_size or 0)
        )
    else:
        widths += len(mlps) * (model.hidden_size + model.ffn_hidden_size)
    return spec.lora.rank * widths


def _attention_widths(model: ModelTable) -> dict[str, int]:
    """Return inputs plus outputs of each attention projection by its Hugging Face name."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.kv_lora_rank is not None:
        rope, value = model.qk_rope_head_dim or 0, model.v_head_dim or model.head_dim
        query_rank, cache_rank = model.q_lora_rank or 0, model.kv_lora_rank
        return {
            "q_a_proj": hidden + query_rank,
            "q_b_proj": query_rank + heads * (model.head_dim + rope),
            "kv_a_proj_with_mqa": hidden + cache_rank + rope,
            "kv_b_proj": cache_rank + heads * (model.head_dim + value),
            "o_proj": heads * value + hidden,
        }
    query, keys = heads * model.head_dim, model.num_query_groups * model.head_dim
    return {
        "q_proj": hidden + query,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": query + hidden,
    }
