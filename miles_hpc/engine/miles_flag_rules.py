"""What raw flags of Miles need, exclude and cost together with the rest of a spec.

Each function is one rule of Miles' own argument checks, told before anything is queued. How flags are read is
`engine.miles_flags`; what depends on whether both sides share their GPUs is `engine.miles_sharing_rules`.
"""

import ipaddress
from collections.abc import Iterator

from miles_hpc.engine.miles_flags import ARGUMENTS, Flags, excluded, flag_check
from miles_hpc.plan.batch import global_batch_size, samples_per_step
from miles_hpc.plan.findings import Verdict
from miles_hpc.spec.job import JobSpec

_ARGUMENTS = f"{ARGUMENTS} (miles_validate_args)"


def _streamed(spec: JobSpec) -> Iterator[Verdict]:
    flags = Flags(spec)
    if not spec.offload.stream_optimizer:
        return
    against = [
        other
        for other in (
            "offload-optimizer-states",
            "use-precision-aware-optimizer",
            "reset-optimizer-states",
            "save-local-weight-checksum",
            "enable-witness",
            "indep-dp",
        )
        if flags.value(other)
    ]
    against += ["[lora]"] if spec.lora is not None else []
    against += ["train.optimizer_cpu_offload"] if spec.train.optimizer_cpu_offload else []
    against += ['offload.train = "host"'] if spec.offload.train == "host" else []
    optimizer = flags.value("optimizer")
    against += [f"optimizer {optimizer}"] if optimizer not in (None, "adam") else []
    if against:
        yield Verdict(
            keys=("offload.stream_optimizer",),
            found=f"stream_optimizer = true with {', '.join(against)}",
            expected="streamed state of full training without them; Miles asserts so at its start",
            fix="Remove it or the others.",
        )


def _rematerialised(spec: JobSpec) -> Iterator[Verdict]:
    name = "rematerialize-param-from-master-weight"
    flags = Flags(spec)
    if not flags.value(name):
        return
    against = [
        other
        for other in (
            "debug-disable-optimizer",
            "indep-dp",
            "keep-old-actor",
            "overlap-param-gather",
            "disable-compute-advantages-and-returns",
        )
        if flags.value(other)
    ]
    against += ["[lora]"] if spec.lora is not None else []
    if spec.offload.train != "host":
        against.append(f'offload.train = "{spec.offload.train}"')
    if flags.value("use-precision-aware-optimizer") and not spec.train.optimizer_cpu_offload:
        against.append("use-precision-aware-optimizer without train.optimizer_cpu_offload")
    if flags.number("num-critic-only-steps"):
        against.append(f"num-critic-only-steps {flags.number('num-critic-only-steps')}")
    yield from excluded(flags.key(name), name, against)


def _batches(spec: JobSpec) -> Iterator[Verdict]:
    flags, rollout = Flags(spec), spec.rollout
    for name, least, key in (
        ("over-sampling-batch-size", rollout.prompts_per_step, "rollout.prompts_per_step"),
        ("async-max-concurrent-samples", rollout.samples_per_prompt, "rollout.samples_per_prompt"),
    ):
        given = flags.number(name)
        if flags.value(name) is not None and given < least:
            yield Verdict(
                keys=(flags.key(name), key),
                found=f"{name}({given}) below {key}({least})",
                expected=f"at least {least}",
                fix=f"Set {name} = {least}, or remove it.",
            )
    for name in ("balance-by-flops", "use-dynamic-global-batch-size"):
        if flags.value(name) and spec.train.max_tokens_per_gpu is None:
            yield Verdict(
                keys=(flags.key(name), "train.max_tokens_per_gpu"),
                found=f"--{name} without a token budget",
                expected="micro-batches that are packed to a budget",
                fix=f"Set train.max_tokens_per_gpu, or remove {name}.",
            )
    updates = samples_per_step(spec) // global_batch_size(spec)
    if flags.value("skip-actor-forward-only") and updates != 1:
        yield Verdict(
            keys=(flags.key("skip-actor-forward-only"), "train.global_batch_size"),
            found=f"--skip-actor-forward-only with {updates} updates a step",
            expected="one update a step, whose own forward pass gives the old logprobs",
            fix="Remove train.global_batch_size, or the flag.",
        )


def _adapters(spec: JobSpec) -> Iterator[Verdict]:
    flags, offload = Flags(spec), spec.offload
    ours, theirs = "experts-shared-outer-loras", "sglang-experts-shared-outer-loras"
    stated = {flag.base for flag in flags.all}
    if theirs in stated and bool(flags.value(ours)) != bool(flags.value(theirs)):
        yield Verdict(
            keys=(flags.key(theirs),),
            found=f"--{theirs} {flags.value(theirs) is not None}, --{ours} {flags.value(ours) is not None}",
            expected="one layout of the experts' adapters on both sides",
            fix=f"Remove {theirs}: it follows {ours}.",
        )
    if spec.lora is None:
        for flag in flags.all:
            if flag.base.startswith(("lora-", "sglang-lora-")) and flag.value is not False:
                yield Verdict(
                    keys=(flag.key, "lora"),
                    found=f"--{flag.name} without [lora]",
                    expected="flags of adapters in a job that trains some; they make Miles train or serve adapters unplanned",
                    fix="Add [lora], or remove the flag.",
                )
    reload = "reload-rollout-weights-from-disk"
    if flags.value(reload) and (offload.base_cpu_backup or offload.rollout != "host"):
        yield Verdict(
            keys=(flags.key(reload), "offload.base_cpu_backup", "offload.rollout"),
            found=f'--{reload} with base_cpu_backup = {str(offload.base_cpu_backup).lower()}, offload.rollout = "{offload.rollout}"',
            expected="a sleeping engine that keeps no base in host memory",
            fix="Set offload.base_cpu_backup = false, or remove the flag.",
        )


def _quantised_updates(spec: JobSpec) -> Iterator[Verdict]:
    flags, model = Flags(spec), spec.model
    if not flags.value("sglang-config"):
        return
    key = flags.key("sglang-config")
    if model.rollout_checkpoint is not None:
        yield Verdict(
            keys=(key, "model.rollout_checkpoint"),
            found=f"--sglang-config beside model.rollout_checkpoint ({model.rollout_quantisation})",
            expected="the file that the package writes for it, with update_weights: true; without that line an engine whose"
            " model_path is another folder than hf_checkpoint never gets an update",
            fix="Remove sglang-config.",
        )
    elif model.rollout_quantisation in ("fp8", "nvfp4", "int4"):
        yield Verdict(
            keys=(key, "model.rollout_quantisation"),
            found=f'--sglang-config with rollout_quantisation "{model.rollout_quantisation}"',
            expected="update_weights: true in that file for a model_path other than hf_checkpoint: it is off there by default",
            fix="Check the file, or set model.rollout_checkpoint and remove it.",
            level="warning",
        )


def _data_parallel_attention(spec: JobSpec) -> Iterator[Verdict]:
    flags, size = Flags(spec), spec.rollout.gpus_per_engine
    replicas = flags.number("sglang-dp-size")
    keys = (flags.key("sglang-dp-size"), "rollout.gpus_per_engine")
    if replicas > 1 and not flags.value("sglang-enable-dp-attention"):
        yield Verdict(
            keys=keys,
            found=f"sglang-dp-size({replicas}) without sglang-enable-dp-attention",
            expected="replicas of the attention alone; Miles runs whole replicas as engines of their own",
            fix="Set sglang-enable-dp-attention = true, or lower rollout.gpus_per_engine.",
        )
    if replicas > 1 and size % replicas:
        yield Verdict(
            keys=keys,
            found=f"gpus_per_engine({size}) % sglang-dp-size({replicas}) = {size % replicas}",
            expected="equal attention groups of gpus_per_engine / dp GPUs",
            fix=f"Set sglang-dp-size to a divisor of {size}.",
        )


def _needs(spec: JobSpec) -> Iterator[Verdict]:
    flags = Flags(spec)
    prompts = flags.value("eval-prompt-data")
    has_eval = prompts or flags.value("eval-config")
    sessions, tito = flags.value("use-session-server"), flags.value("tito-model")
    named = tito not in (None, "default")
    replay = flags.value("use-rollout-indexer-replay") or flags.value("use-indexer-replay")
    is_ppo = flags.value("advantage-estimator") == "ppo"
    engine = spec.engine.miles
    rolls_out_only = engine is not None and engine.mode == "debug_rollout_only"
    cases = (
        ("eval-interval", flags.value("eval-interval") and not has_eval, "no evaluation set", "eval-prompt-data"),
        ("eval-prompt-data", isinstance(prompts, tuple) and len(prompts) > 1 and len(prompts) % 2,
         f"{len(prompts) if isinstance(prompts, tuple) else 0} words", "pairs of a name and a path"),
        ("tito-model", named and not sessions, "no session server", "use-session-server"),
        ("tito-model", named and flags.value("chat-template-path"), "--chat-template-path",
         "one of them: a named model brings its template"),
        ("pause-generation-mode", sessions and flags.value("pause-generation-mode") == "abort",
         "a session server", "another mode than abort, which would cut sessions"),
        *(("use-session-server", sessions == "v2" and flags.value(other), f"--{other}", "one of them")
          for other in ("group-rm", "partial-rollout", "recompute-logprobs-via-prefill")),
        ("debug-train-only", rolls_out_only and flags.value("debug-train-only"),
         'engine.miles.mode = "debug_rollout_only"', "one of them"),
        ("use-rollout-indexer-replay", replay and spec.parallel.cp > 1, f"cp({spec.parallel.cp})", "cp = 1"),
        ("advantage-estimator", is_ppo and spec.train.kl_coef, f"train.kl_coef = {spec.train.kl_coef:g}",
         "kl_coef = 0 with a critic"),
        ("advantage-estimator", is_ppo and flags.value("megatron-to-hf-mode") == "bridge",
         "--megatron-to-hf-mode bridge", "raw with a critic"),
    )  # fmt: skip
    for name, breaks, found, expected in cases:
        if breaks:
            yield Verdict(
                keys=(flags.key(name),),
                found=f"--{name} {flags.value(name)} with {found}",
                expected=f"{expected}; Miles ends at its start otherwise",
                fix="Change one of the two.",
            )


def _addresses(spec: JobSpec) -> Iterator[Verdict]:
    name = "MILES_ROUTER_EXTERNAL_HOST"
    value = spec.env.get(name)
    if spec.job.engine == "miles" and value is not None and not _is_address(value):
        yield Verdict(
            keys=(f"env.{name}",),
            found=f'{name} = "{value}"',
            expected="a numeric address; the router parses it as one and does not resolve names",
            fix="Write the address, such as 10.0.0.7.",
        )


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return False
    return True


FLAG_RULE_CHECKS = (
    flag_check(
        565,
        _streamed,
        "streamed optimizer state, alone",
        "Streaming owns the optimizer's state on disk; whatever else moves, rewrites or checks that state excludes it.",
        _ARGUMENTS,
        fixed=True,
    ),
    flag_check(
        566,
        _rematerialised,
        "weights that are made again from their masters",
        "Dropping the trainer's weights while it sleeps works where the master weights are whole and in host memory.",
        _ARGUMENTS,
        fixed=True,
    ),
    flag_check(
        567,
        _batches,
        "flags of the batches that agree with the spec",
        "Miles asserts these between its flags, after every node has come up.",
        f"{_ARGUMENTS}; miles/utils/dp_schedule.py",
    ),
    flag_check(
        568,
        _adapters,
        "flags of the adapters that agree",
        "Both sides must hold the same adapters in the same layout, and the base in one place.",
        _ARGUMENTS,
    ),
    flag_check(
        569,
        _quantised_updates,
        "quantised engines that get their updates",
        "An engine that loads another folder than the trainer's model gets no weight updates unless its configuration says"
        " update_weights: true; rollouts would come from the first policy for ever.",
        "radixark/miles 31f1ca961 miles/ray/rollout/rollout_server.py (sglang_config)",
    ),
    flag_check(
        570,
        _data_parallel_attention,
        "data-parallel attention in equal groups",
        "SGLang splits an engine's attention into dp replicas of gpus_per_engine / dp GPUs.",
        "radixark/miles 31f1ca961 miles/backends/sglang_utils/arguments.py",
    ),
    flag_check(
        571,
        _needs,
        "flags that need or exclude one another",
        "Miles checks these at its start and ends; here they are told before the job is queued.",
        _ARGUMENTS,
    ),
    flag_check(
        574,
        _addresses,
        "addresses where names are not resolved",
        "Miles' router parses its external host as a socket address.",
        "radixark/miles 31f1ca961 examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py (router_external_host)",
    ),
)
