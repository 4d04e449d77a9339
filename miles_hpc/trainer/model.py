"""A genuine megatron-core GPTModel for the shape in a spec, with the parts that Transformer Engine would otherwise give.

Three things are ours: an RMSNorm that works with sequence parallelism, causal attention through torch's fused kernel, and
a last stage that returns hidden states so that logits are made only where they are needed (`trainer.head`).

Legend: S sequence, B micro-batch row, H hidden, N query heads of this rank, G key/value heads of this rank, D head dim.
Knows no checkpoint, adapter or loss.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from miles_hpc.errors import Fault, PlanError
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.model import ModelTable
from miles_hpc.trainer.grid import Grid

FAMILIES = ("llama", "qwen3")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RMSNorm(nn.Module):
    """RMSNorm over the last axis; megatron-core's own refuses sequence parallelism without Transformer Engine."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Tells megatron's finalize_model_grads to sum the gradient over the tensor parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in fp32, scale in the weights' type."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class CausalAttention(nn.Module):
    """Causal attention through `scaled_dot_product_attention`, which never materialises [B, N, S, S] scores.

    Rows are padded on the right, so the causal mask alone keeps padding out of every real position.
    """

    def __init__(
        self, config: TransformerConfig, *, softmax_scale: float | None, **_: object
    ) -> None:
        super().__init__()
        self.scale: float = softmax_scale or config.kv_channels**-0.5

    def forward(
        self, query_SBND: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, *_: object, **__: object
    ) -> Tensor:
        """Return the heads' outputs side by side, [S, B, N * D]."""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_SBND, key_SBGD, value_SBGD))
        output_BNSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output_BNSD.permute(2, 0, 1, 3).flatten(2)


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose last stage returns the normalised hidden states [S, B, H] instead of logits of every position."""

    def _postprocess(self, hidden_states: Tensor, **_: object) -> Tensor:
        return hidden_states

    def output_weight(self) -> Tensor:
        """Return this rank's rows of the output layer, [vocabulary / tp, H]; last stage only."""
        if self.share_embeddings_and_output_weights:
            return cast(Tensor, self.shared_embedding_or_output_weight())
        return cast(Tensor, self.output_layer.weight)


def unsupported(spec: JobSpec) -> Sequence[Fault]:
    """Return what this spec asks for that the native trainer cannot do; empty when it can train it."""
    model, parallel = spec.model, spec.parallel
    heads, groups = model.num_attention_heads, model.num_query_groups
    checks = (
        (model.family in FAMILIES, "model.family", model.family, f"one of {', '.join(FAMILIES)}"),
        (model.num_experts is None, "model.num_experts", model.num_experts, "a dense model"),
        (model.num_mtp_layers == 0, "model.num_mtp_layers", model.num_mtp_layers, "0"),
        (not model.attention_bias, "model.attention_bias", model.attention_bias, "no biases"),
        (parallel.cp == 1, "parallel.cp", parallel.cp, "1"),
        (parallel.ep * parallel.etp == 1, "parallel.ep/etp", parallel.ep * parallel.etp, "1"),
        (groups % parallel.tp == 0, "parallel.tp", parallel.tp, f"a divisor of {groups} KV heads"),
        (heads % groups == 0, "model.num_attention_heads", heads, f"a multiple of {groups}"),
        (spec.lora is not None, "lora", "no [lora] table", "LoRA: the base stays frozen"),
        (spec.lora is None or spec.lora.dropout == 0, "lora.dropout", "a dropout", "0"),
    )
    return tuple(
        Fault(
            where=f"native trainer: {where}",
            found=str(found),
            expected=expected,
            fix="Change the spec, or use job.engine = 'miles'.",
        )
        for ok, where, found, expected in checks
        if not ok
    )


def weight_dtype(spec: JobSpec) -> torch.dtype:
    """Return the type of the base weights: `engine.native.cpu_dtype` on CPU, `model.train_dtype` on GPU."""
    if spec.cluster.device == "cpu":
        return _DTYPES["fp32" if spec.engine.native is None else spec.engine.native.cpu_dtype]
    return _DTYPES[spec.model.train_dtype]


def padded_vocab_size(model: ModelTable, tp: int) -> int:
    """Return the vocabulary rounded up to a multiple of `tp`; the head never looks at the rows added."""
    return -(-model.vocab_size // tp) * tp


def _transformer_config(spec: JobSpec, grid: Grid) -> TransformerConfig:
    model, parallel, dtype = spec.model, spec.parallel, weight_dtype(spec)
    choices: dict[str, dict[str, object]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        num_layers_in_first_pipeline_stage=parallel.first_stage_layers,
        num_layers_in_last_pipeline_stage=parallel.last_stage_layers,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights come from a checkpoint: initialising them first would touch every page twice.
        perform_initialization=False,
        use_cpu_initialization=grid.device.type == "cpu",
        # Micro-batches differ in length and number of rows; stages tell each other the shape.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # unused, but the default is refused with the line above
        # finalize_model_grads divides by the weight of the whole global batch, over all dp ranks.
        calculate_per_token_loss=True,
        # Fused kernels that need Transformer Engine or apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **choices[spec.train.recompute],
    )


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )


def build_model(spec: JobSpec, grid: Grid) -> PolicyModel:
    """Build this rank's stage and shard of the model, uninitialised and frozen.

    Raises:
        PlanError: if the native trainer cannot train what the spec asks for.
    """
    faults = unsupported(spec)
    if faults:
        raise PlanError("\n".join(map(str, faults)))
    config = _transformer_config(spec, grid)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # Both copies of tied embeddings are read from the checkpoint and stay frozen: nothing to synchronise.
    groups.embd = None
    model = PolicyModel(
        config=config,
        transformer_layer_spec=_block_spec(config),
        vocab_size=padded_vocab_size(spec.model, grid.tp),
        max_sequence_length=spec.model.max_position_embeddings,
        pre_process=grid.is_first_stage,
        post_process=grid.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=spec.model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=spec.model.rope_theta,
        pg_collection=groups,
    )
    model.requires_grad_(requires_grad=False)
    if spec.train.recompute == "full" and grid.is_first_stage:
        # A checkpointed layer whose input needs no gradient would give none to its adapters either.
        model.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())
    return model
