"""The pages of the rules about keys that need one another, as `miles-hpc explain` prints them.

Which keys and conditions each rule is about stands in `spec.effects`.
"""

from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"
ENGINE = Rule(
    id="MH101",
    title="the table of the engine that runs",
    reason="A table of the other engine would be read by nobody; the miles engine cannot start without its checkout.",
    source="docs/reference/job-spec.md",
)
MILES_KEYS = Rule(
    id="MH102",
    title="keys of the miles engine",
    reason="The native engine has no such setting: it trains from the Hugging Face checkpoint, keeps the optimizer of its"
    " adapters beside them, and ships adapters alone.",
    source="docs/design.md, the native engine",
)
SGLANG_KEYS = Rule(
    id="MH103",
    title="keys of SGLang",
    reason="The transformers rollout engine generates one batch after the other; it has no KV pool, server or backend to set.",
    source="docs/design.md, the native engine",
)
DEVICE_KEYS = Rule(
    id="MH104",
    title="keys of the device",
    reason="On CPU there is no GPU to count, to ask for or to plan; on GPU every rank has one, so there are no CPU ranks.",
    source="docs/reference/job-spec.md",
)
WEIGHTS_KEYS = Rule(
    id="MH105",
    title="keys of the place the weights come from",
    reason="Weights come from one place; a second one would be ignored silently.",
    source="docs/reference/job-spec.md",
)
EXPERT_KEYS = Rule(
    id="MH106",
    title="the shape of a mixture of experts, whole",
    reason="The layout and the memory of a plan need the number, the choice and the width of the experts, or none of them.",
    source="docs/reference/job-spec.md",
)
DATA_KEYS = Rule(
    id="MH107",
    title="keys of the data source",
    reason="Prompts come from one source: tasks that the native engine makes from a seed, or a file that Miles reads.",
    source=f"docs/reference/job-spec.md; {_MILES} miles/utils/arguments.py (prompt-data, input-key)",
)
MICRO_BATCH = Rule(
    id="MH108",
    title="one way of making micro-batches",
    reason="Either samples are counted, or tokens are; Megatron cannot do both.",
    source=f"{_MILES} miles/utils/arguments.py (use_dynamic_batch_size)",
)
AXIS_KEYS = Rule(
    id="MH109",
    title="keys of a parallel axis that is used",
    reason="Megatron ignores an uneven split without pipeline stages and sequence parallelism without tensor parallelism,"
    " the latter without a word.",
    source=f"{_MILES} miles/utils/arguments.py; Megatron-LM training/arguments.py validate_args",
)
RESUME_KEYS = Rule(
    id="MH110",
    title="attempts need resume",
    reason='With resume = "never" there is exactly one attempt.',
    source="docs/design.md",
)
OFFLOAD_KEYS = Rule(
    id="MH111",
    title="keys of an offload that happens",
    reason="A chunk size belongs to scratch disk; a peak device to two sides that take turns; a copy of the frozen base to"
    " LoRA over an engine that sleeps; streamed optimizer state to the native engine's own optimizer; dropping the page"
    " cache at an alarm to files that are dropped at all.",
    source=f"{_MILES} miles/utils/arguments.py:187-256 and 1764",
)
SLURM_KEYS = Rule(
    id="MH112",
    title="Slurm's keys on the command line of a local job",
    reason="A file serves both clusters, so its Slurm keys may stand; one that --set names for a local job does nothing.",
    source="docs/reference/job-spec.md",
)
NATIVE_LIMITS = Rule(
    id="MH113",
    title="what the native engine does",
    reason="It samples from the policy itself (so no nucleus), adapts without dropout, and knows the layer layout of two"
    " families.",
    source="docs/design.md, the native engine",
)
ROLLOUT_ENGINE = Rule(
    id="MH114",
    title="a rollout engine that fits the trainer",
    reason="The transformers engine is the native engine's, for machines without GPU; Miles serves rollouts with SGLang.",
    source="docs/design.md, the native engine",
)
FAMILY_KEYS = Rule(
    id="MH115",
    title="keys of the model family",
    reason="Latent attention and sparse-attention layers are GLM's, linear mixers are Qwen3.5's; elsewhere they are a"
    " copied shape.",
    source=f"{_MILES} scripts/models/glm5.2-744B-A40B.py, scripts/models/qwen3.5-35B-A3B.py",
)
NCCL_KEYS = Rule(
    id="MH116",
    title="keys of the library that is injected",
    reason="Without preload the library is whatever torch resolves; a path to another one would be read by nobody, and nothing"
    " is proved of it.",
    source="docs/design.md, what runs on a node",
)

EFFECT_RULES: tuple[Rule, ...] = (
    ENGINE,
    MILES_KEYS,
    SGLANG_KEYS,
    DEVICE_KEYS,
    WEIGHTS_KEYS,
    EXPERT_KEYS,
    DATA_KEYS,
    MICRO_BATCH,
    AXIS_KEYS,
    RESUME_KEYS,
    OFFLOAD_KEYS,
    SLURM_KEYS,
    NATIVE_LIMITS,
    ROLLOUT_ENGINE,
    FAMILY_KEYS,
    NCCL_KEYS,
)
