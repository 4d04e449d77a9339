"""The raw flags of a miles job as its driver will read them, and the rules about their names.

A flag may stand in `engine.miles.extra_args` as a key, or hide as an element of an array; argparse accepts both, takes the
last of two, and completes a shortened name. Knows which flags follow from keys of the spec; what flags mean together is
`engine.miles_flag_rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"
ARGUMENTS = f"{_MILES} miles/utils/arguments.py"
EXTRA_ARGS = "engine.miles.extra_args"
FlagValue = str | int | float | bool | tuple[str, ...]

OWNED: Mapping[str, str] = {
    "actor-num-nodes": "cluster.num_nodes",
    "actor-num-gpus-per-node": "cluster.gpus_per_node",
    "num-gpus-per-node": "cluster.gpus_per_node",
    "rollout-num-gpus": "rollout.own_gpus",
    "rollout-num-gpus-per-engine": "rollout.gpus_per_engine",
    "colocate": "rollout.own_gpus",
    "tensor-model-parallel-size": "parallel.tp",
    "pipeline-model-parallel-size": "parallel.pp",
    "context-parallel-size": "parallel.cp",
    "expert-model-parallel-size": "parallel.ep",
    "expert-tensor-parallel-size": "parallel.etp",
    "sequence-parallel": "parallel.sequence_parallel",
    "decoder-first-pipeline-num-layers": "parallel.first_stage_layers",
    "decoder-last-pipeline-num-layers": "parallel.last_stage_layers",
    "rollout-batch-size": "rollout.prompts_per_step",
    "n-samples-per-prompt": "rollout.samples_per_prompt",
    "rollout-max-prompt-len": "rollout.max_prompt_tokens",
    "rollout-max-response-len": "rollout.max_response_tokens",
    "rollout-temperature": "rollout.temperature",
    "rollout-top-p": "rollout.top_p",
    "sglang-tp-size": "rollout.gpus_per_engine",
    "sglang-ep-size": "rollout.expert_parallel",
    "sglang-mem-fraction-static": "rollout.mem_fraction_static",
    "sglang-max-running-requests": "rollout.max_running_requests",
    "sglang-context-length": "rollout.context_length",
    "sglang-attention-backend": "rollout.attention_backend",
    "sglang-moe-runner-backend": "rollout.moe_runner_backend",
    "sglang-lora-backend": "rollout.lora_backend",
    "sglang-max-lora-rank": "lora.rank",
    "num-rollout": "train.num_steps",
    "num-epoch": "train.num_steps",
    "num-steps-per-rollout": "train.global_batch_size",
    "global-batch-size": "train.global_batch_size",
    "micro-batch-size": "train.micro_batch_size",
    "max-tokens-per-gpu": "train.max_tokens_per_gpu",
    "use-dynamic-batch-size": "train.max_tokens_per_gpu",
    "lr": "train.learning_rate",
    "clip-grad": "train.clip_grad",
    "eps-clip": "train.clip_low",
    "eps-clip-high": "train.clip_high",
    "adam-beta1": "train.adam_betas",
    "adam-beta2": "train.adam_betas",
    "adam-eps": "train.adam_eps",
    "weight-decay": "train.weight_decay",
    "kl-coef": "train.kl_coef",
    "kl-loss-coef": "train.kl_coef",
    "use-kl-loss": "train.kl_coef",
    "calculate-per-token-loss": "train.loss_aggregation",
    "disable-grpo-std-normalization": "train.normalise_advantages",
    "recompute-granularity": "train.recompute",
    "recompute-method": "train.recompute",
    "recompute-num-layers": "train.recompute",
    "optimizer-cpu-offload": "train.optimizer_cpu_offload",
    "seed": "train.seed",
    "rollout-seed": "train.seed",
    "lora-rank": "lora.rank",
    "lora-alpha": "lora.alpha",
    "lora-dropout": "lora.dropout",
    "target-modules": "lora.target_modules",
    "lora-base-cpu-backup": "offload.base_cpu_backup",
    "offload": "offload.train and offload.rollout",
    "offload-train": "offload.train",
    "offload-rollout": "offload.rollout",
    "offload-train-target": "offload.train",
    "offload-train-disk-dir": "offload.scratch_root",
    "offload-train-disk-chunk-mb": "offload.chunk",
    "stream-optimizer-state-to-disk": "offload.stream_optimizer",
    "colocate-memory-peak-device": "offload.peak_device",
    "drop-checkpoint-page-cache-after-load": "offload.drop_page_cache",
    "hf-checkpoint": "model.hf_checkpoint",
    "ref-load": "model.megatron_checkpoint",
    "load": "job.resume",
    "save": "the package, in the run folder",
    "save-interval": "checkpoint.save_interval",
    "save-retain-interval": "checkpoint.keep",
    "save-hf": "checkpoint.save_hf",
    "save-trigger-sentinel": "the package, which saves before the time limit",
    "prompt-data": "data.path",
    "input-key": "data.input_key",
    "label-key": "data.label_key",
    "metadata-key": "data.metadata_key",
    "apply-chat-template": "data.apply_chat_template",
    "rollout-shuffle": "data.shuffle",
    "rm-type": "data.reward",
    "debug-rollout-only": "engine.miles.mode",
    "start-rollout-id": "the package, which continues from the last checkpoint",
    "custom-config-path": "the package, which continues from the last checkpoint",
    "wandb-key": "the package, from WANDB_API_KEY of [secrets]: arguments are seen by everyone on a node",
}
"""Flags that follow from the spec, and the key that each follows from."""

_ALIASES: Mapping[str, str] = {
    "sglang-tensor-parallel-size": "sglang-tp-size",
    "sglang-data-parallel-size": "sglang-dp-size",
    "sglang-expert-parallel-size": "sglang-ep-size",
    "sglang-ep": "sglang-ep-size",
}
_WHOLE_NAMES = frozenset({"optimizer"})
"""Names that begin like an owned flag and are flags of their own."""
NOT_EXPOSED = frozenset(
    f"sglang-{name}"
    for name in (
        "model-path",
        "trust-remote-code",
        "random-seed",
        "enable-memory-saver",
        "port",
        "nnodes",
        "node-rank",
        "dist-init-addr",
        "gpu-id-step",
        "base-gpu-id",
        "nccl-port",
        "skip-server-warmup",
        "enable-return-routed-experts",
        "enable-return-indexer-topk",
    )
)
"""Flags of SGLang that no revision of Miles passes on. Source: radixark/miles 31f1ca961 miles/backends/sglang_utils/arguments.py."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as argparse meets it: its whole name without dashes, and the key it was written at."""

    name: str
    value: FlagValue
    key: str

    @property
    def base(self) -> str:
        """The name that a later flag would override: without the "no-" of its opposite, aliases made one."""
        name = self.name.removeprefix("no-")
        return _ALIASES.get(name, name)


class Flags:
    """All raw flags of a spec, in the order of the command line."""

    def __init__(self, spec: JobSpec) -> None:
        engine = spec.engine.miles
        self.all = () if engine is None else tuple(_expanded(engine.extra_args))

    def value(self, name: str) -> FlagValue | None:
        """Return the value that the script will see for `name`; None when it stands nowhere or is switched off."""
        last = next((flag for flag in reversed(self.all) if flag.base == name), None)
        return None if last is None or last.name.startswith("no-") else last.value

    def number(self, name: str) -> int:
        """Return the value of `name` as a whole number; 0 when it is none."""
        text = str(self.value(name))
        return int(text) if text.isdigit() else 0

    def key(self, name: str) -> str:
        """Return the key path at which `name` stands."""
        return next((flag.key for flag in reversed(self.all) if flag.base == name), EXTRA_ARGS)


def _expanded(extra: Mapping[str, FlagValue]) -> Iterator[Flag]:
    """Yield each flag, those too that stand among the values of another."""
    for name, value in extra.items():
        key = f"{EXTRA_ARGS}.{name}"
        words = value if isinstance(value, tuple) else ()
        starts = [index for index, word in enumerate(words) if word.startswith("--")]
        if value is False:
            continue
        yield Flag(name, words[: starts[0]] if starts else value, key)
        for start, end in pairwise([*starts, len(words)]):
            hidden, is_joined, joined = words[start][2:].partition("=")
            inner = words[start + 1 : end]
            single: FlagValue = inner[0] if len(inner) == 1 else inner or True
            yield Flag(hidden, joined if is_joined else single, key)


def excluded(key: str, name: str, against: Sequence[str]) -> Iterator[Verdict]:
    """Yield that the flag `name`, written at `key`, cannot stand with what is in `against`, if anything is."""
    if against:
        yield Verdict(
            keys=(key,),
            found=f"--{name} with {', '.join(against)}",
            expected="it without them; Miles asserts so at its start",
            fix=f"Remove {name} or the others.",
        )


def flag_check(
    number: int,
    verdicts: Callable[[JobSpec], Iterator[Verdict]],
    title: str,
    reason: str,
    source: str,
    *,
    fixed: bool = False,
) -> Check:
    """Return the check of the rule MHnumber."""
    rule = Rule(id=f"MH{number}", title=title, reason=reason, source=source, fixed=fixed)
    return Check(rule, verdicts)


def _owned(spec: JobSpec) -> Iterator[Verdict]:
    for flag in Flags(spec).all:
        whole = [flag.base] if flag.base in OWNED else []
        if not whole and flag.base not in _WHOLE_NAMES:
            whole = [name for name in OWNED if name.startswith(flag.base)]
        if whole:
            short = "" if flag.base == whole[0] else f", which argparse reads as --{whole[0]}"
            yield Verdict(
                keys=(flag.key,),
                found=f"--{flag.name}{short} among the raw flags",
                expected=f"a flag that does not follow from the spec: this one is set by {OWNED[whole[0]]}",
                fix="Remove it, and set that key.",
            )


def _once(spec: JobSpec) -> Iterator[Verdict]:
    seen: dict[str, list[Flag]] = {}
    for flag in Flags(spec).all:
        seen.setdefault(flag.base, []).append(flag)
    for flags in seen.values():
        if len(flags) > 1:
            last = flags[-1]
            yield Verdict(
                keys=(last.key,),
                found=f"{len(flags)} of one flag: {', '.join(f'--{flag.name}' for flag in flags)}",
                expected=f"each flag once: argparse takes the last, --{last.name} = {last.value}",
                fix="Remove the others.",
                level="warning",
            )


FLAG_CHECKS = (
    Check(
        Rule(
            id="MH561",
            fixed=True,
            title="flags with one owner",
            reason="A raw flag comes last on the command line and would override, unseen, what the plan was made for: the"
            " layout, the memory and the batches of the spec. Arrays and shortened names are read as argparse reads them.",
            source=f"{ARGUMENTS}; Python manual, argparse (allow_abbrev)",
        ),
        _owned,
    ),
    Check(
        Rule(
            id="MH562",
            title="each flag once",
            reason="Of two flags with one name argparse takes the last and says nothing; a flag and its no- form are one.",
            source="Python manual, argparse (action store); seen in launchers that end with extra arguments",
        ),
        _once,
    ),
)
