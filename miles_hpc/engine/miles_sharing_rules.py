"""What raw flags of Miles need where trainer and rollout share every GPU, and where rollout has GPUs of its own.

Each function is one rule of Miles' own argument checks. How flags are read is `engine.miles_flags`.
"""

from collections.abc import Iterator

from miles_hpc.engine.miles_flags import ARGUMENTS, Flags, excluded, flag_check
from miles_hpc.plan.findings import Verdict
from miles_hpc.spec.job import JobSpec

_ARGUMENTS = f"{ARGUMENTS} (miles_validate_args)"


def _shared_gpus(spec: JobSpec) -> Iterator[Verdict]:
    engine, flags = spec.engine.miles, Flags(spec)
    if engine is None or spec.rollout.own_gpus is not None:
        return
    found = []
    if engine.script == "train_async.py":
        found.append(("engine.miles.script", "script train_async.py"))
    for name in ("fully-async", "rollout-external", "eval-hf-dir"):
        if flags.value(name):
            found.append((flags.key(name), f"--{name}"))
    if flags.number("multi-lora-n-adapters"):
        name = "multi-lora-n-adapters"
        found.append((flags.key(name), f"--{name} {flags.number(name)}"))
    mode = flags.value("update-weight-transfer-mode")
    if mode in ("p2p", "disk-delta"):
        found.append((flags.key("update-weight-transfer-mode"), f"weight transfer mode {mode}"))
    if spec.offload.peak_device == "gpu" and flags.value("advantage-estimator") == "ppo":
        found.append(("offload.peak_device", 'peak_device = "gpu" with a critic'))
    for key, text in found:
        yield Verdict(
            keys=(key,),
            found=f"{text} on GPUs that trainer and rollout share",
            expected="what a colocated job can do; Miles asserts that these are not colocated",
            fix="Remove it, or give rollout GPUs of its own with rollout.own_gpus.",
        )


_NOT_ASYNC = (
    "rollout-function-path",
    "partial-rollout",
    "recompute-logprobs-via-prefill",
    "rollout-all-samples-process-path",
    "multi-lora-n-adapters",
)
_DELTA_FOLDERS = ("update-weight-disk-dir", "update-weight-local-checkpoint-dir")


def _own_gpus(spec: JobSpec) -> Iterator[Verdict]:
    engine, flags = spec.engine.miles, Flags(spec)
    if engine is None:
        return
    yield from _fully_async(flags, engine.script)
    yield from _transfer(spec, flags)
    yield from _adapters_elsewhere(spec, flags)
    if flags.number("eval-num-gpus"):
        yield Verdict(
            keys=(flags.key("eval-num-gpus"), "cluster.num_nodes"),
            found=f"--eval-num-gpus {flags.number('eval-num-gpus')}",
            expected="GPUs that the spec counts: Miles would ask for these beside all that it has",
            fix="Remove it.",
        )


def _fully_async(flags: Flags, script: str) -> Iterator[Verdict]:
    if not flags.value("fully-async"):
        return
    against = [f"--{name}" for name in _NOT_ASYNC if flags.value(name)]
    if flags.value("pause-generation-mode") == "abort":
        against.append("--pause-generation-mode abort")
    if script != "train_async.py":
        against.append(f"script {script}")
    yield from excluded(flags.key("fully-async"), "fully-async", against)


def _transfer(spec: JobSpec, flags: Flags) -> Iterator[Verdict]:
    name = "update-weight-transfer-mode"
    mode = flags.value(name)
    if mode not in ("p2p", "disk-delta"):
        return
    against = ["[lora]"] if spec.lora is not None else []
    against += ["--prefill-num-servers"] if flags.value("prefill-num-servers") else []
    if mode == "disk-delta":
        against += [f"no --{folder}" for folder in _DELTA_FOLDERS if not flags.value(folder)]
    yield from excluded(flags.key(name), f"{name} {mode}", against)


def _adapters_elsewhere(spec: JobSpec, flags: Flags) -> Iterator[Verdict]:
    own = spec.rollout.own_gpus
    if own is None or spec.lora is None:
        return
    if spec.parallel.pp > 1:
        yield Verdict(
            keys=("parallel.pp", "lora", "rollout.own_gpus"),
            found=f"pp({spec.parallel.pp}) with [lora] and rollout.own_gpus({own})",
            expected="one pipeline stage: adapters are broadcast to engines on other GPUs from the first stage alone",
            fix="Set parallel.pp = 1, or share the GPUs.",
        )
    if flags.value("megatron-to-hf-mode") != "bridge":
        yield Verdict(
            keys=(flags.key("megatron-to-hf-mode"), "lora", "rollout.own_gpus"),
            found=f"megatron-to-hf-mode {flags.value('megatron-to-hf-mode') or '(default)'} with [lora] and"
            f" rollout.own_gpus({own})",
            expected="bridge, the only way in which adapters travel to engines on other GPUs",
            fix='Set megatron-to-hf-mode = "bridge".',
        )


def _prefill_graphs(spec: JobSpec) -> Iterator[Verdict]:
    flags = Flags(spec)
    backend = flags.value("sglang-cuda-graph-backend-prefill")
    if spec.rollout.own_gpus is None and backend not in (None, "disabled"):
        yield Verdict(
            keys=(flags.key("sglang-cuda-graph-backend-prefill"),),
            found=f"--sglang-cuda-graph-backend-prefill {backend} on shared GPUs",
            expected='"disabled": the graphs hold NVLink multicast memory that the trainer then lacks',
            fix="Remove it; Miles disables it for colocated jobs.",
            level="warning",
        )


SHARING_CHECKS = (
    flag_check(
        564,
        _shared_gpus,
        "what shared GPUs exclude",
        "Trainer and engines take turns on every GPU; what needs engines that answer while the trainer works cannot run.",
        f"{_ARGUMENTS}; train_async.py",
        fixed=True,
    ),
    flag_check(
        575,
        _own_gpus,
        "what engines with GPUs of their own need",
        "Beside the trainer, rollout can go on while it trains, and weights travel over the network: each way has its limits.",
        f"{_ARGUMENTS}; train.py; train_async.py; miles/ray/placement_group.py;"
        " miles/backends/megatron_utils/update_weight/update_weight_from_distributed/mixin.py",
        fixed=True,
    ),
    flag_check(
        573,
        _prefill_graphs,
        "no captured prefill beside a trainer",
        "Graphs of the prefill keep NVLink multicast buffers mapped while the trainer works.",
        "radixark/miles 31f1ca961 miles/utils/arguments.py (sglang_cuda_graph_backend_prefill)",
    ),
)
