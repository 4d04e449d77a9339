"""The checks of a node's GPUs: how many, how healthy, and whether their driver runs the job's CUDA.

Pure: the probe has asked the driver. What ends a job is what makes wrong numbers, a hang or a start that fails; what makes
it slow is a warning. Sources: NVML's API reference; "NVIDIA GPU Memory Error Management" for remapped rows.
"""

from collections.abc import Iterable, Mapping

from miles_hpc.handoff import Handoff
from miles_hpc.node.checks.observation import Observation
from miles_hpc.run.gpu_state import GpuState
from miles_hpc.run.node_report import Level, NodeFinding
from miles_hpc.units import format_bytes

_CHECK = "GPU health"
_LOST = {15: "it has fallen off the bus", 16: "it needs a reset"}
# nvmlClocksEventReason: those that slow a GPU down for its own protection. Idle and power cap are everyday.
_THROTTLES = {
    0x8: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}
_RECOVERY = {
    1: "a GPU reset",
    2: "a reboot of the node",
    3: "draining of its peers",
    4: "draining and a reset",
    5: "a reset over the bus",
}
_FABRIC_DONE = 3
_FABRIC_UNDER_WAY = {1: "not started", 2: "in progress"}
# A CUDA context of an idle monitor takes some hundred MiB; more is another program's.
_MEMORY_IN_USE_BYTES = 2 << 30
_DRAIN = (
    "Drain the node and have the GPU reset or replaced; exclude it meanwhile (sbatch --exclude)."
)


def check_gpus(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Slurm gave as many GPUs as the job uses, and the driver shows them."""
    needed = handoff.gpus_per_node
    if needed == 0 or seen.gpus is None:
        return
    count, source = seen.visible_gpus
    yield _finding(
        seen,
        "GPUs",
        f"{count} in {source}",
        f"{needed} GPUs on each node",
        "Ask Slurm for them (cluster.gpus_per_node and the site's GRES style).",
        "ok" if count >= needed else "fault",
    )
    if seen.gpus.error:
        # Not every machine that computes on GPUs has the management library, such as one behind a compatibility layer.
        yield _finding(
            seen,
            _CHECK,
            seen.gpus.error,
            "NVIDIA's management library, to tell whether the GPUs are healthy",
            "Mount libnvidia-ml.so.1 into the container (capability `utility`), or look at nvidia-smi.",
            "warning",
        )
    elif len(seen.gpus.gpus) < needed:
        yield _finding(
            seen,
            "GPUs",
            f"{len(seen.gpus.gpus)} that the driver {seen.gpus.driver} shows",
            f"{needed} GPUs on each node",
            "Look at the kernel's log for NVRM and Xid lines; " + _DRAIN,
            "fault",
        )


def check_gpu_health(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Each GPU of the job answers, has sound memory, runs at speed and has its links."""
    if seen.gpus is None or seen.gpus.error:
        return
    chosen = chosen_gpus(seen.gpus.gpus, seen.visible_gpus[1])
    found = [finding for gpu in chosen for finding in judge_gpu(seen, gpu)]
    yield from found
    if chosen and not found:
        names = ", ".join(sorted({str(gpu.name) for gpu in chosen}))
        yield _finding(
            seen,
            _CHECK,
            f"{len(chosen)} x {names}",
            "ECC, clocks, memory and links sound",
            "",
            "ok",
        )
    del handoff


def chosen_gpus(gpus: tuple[GpuState, ...], source: str) -> tuple[GpuState, ...]:
    """Return the GPUs that the job may use, as CUDA_VISIBLE_DEVICES names them; all of them where it does not tell."""
    name, _, value = source.partition("=")
    words = [word.strip() for word in value.split(",") if word.strip()]
    if name != "CUDA_VISIBLE_DEVICES" or not words:
        return gpus
    chosen = tuple(
        gpu
        for gpu in gpus
        if any(word == str(gpu.index) or (gpu.uuid or "").startswith(word) for word in words)
    )
    return chosen if len(chosen) == len(words) else gpus


def judge_gpu(seen: Observation, gpu: GpuState) -> Iterable[NodeFinding]:
    """Return what is wrong with one GPU."""
    name = f"GPU {gpu.index}"
    if gpu.code != 0:
        why = _LOST.get(gpu.code, "it does not answer")
        yield _finding(
            seen,
            _CHECK,
            f"{name}: NVML error {gpu.code}: {why}",
            "a GPU that answers",
            _DRAIN,
            "fault",
        )
        return
    for is_bad, found, expected, fix, level in (
        *_memory_questions(gpu),
        *_link_questions(gpu),
        *_speed_questions(gpu),
    ):
        if is_bad:
            yield _finding(seen, _CHECK, f"{name}: {found}", expected, fix, level)


_Question = tuple[bool, str, str, str, Level]


def _memory_questions(gpu: GpuState) -> tuple[_Question, ...]:
    used = gpu.used_bytes or 0
    return (
        (
            bool(gpu.remap_failed),
            "its memory has no spare row left for a bad one",
            "memory whose bad rows were replaced",
            _DRAIN,
            "fault",
        ),
        (
            bool(gpu.recovery_action),
            f"its driver asks for {_RECOVERY.get(gpu.recovery_action or 0, 'a repair')}",
            "a GPU that needs no repair",
            _DRAIN,
            "fault",
        ),
        (
            (gpu.ecc_uncorrected or 0) > 0,
            f"{gpu.ecc_uncorrected} uncorrected ECC errors since the driver was loaded",
            "none",
            _DRAIN,
            "fault",
        ),
        (
            bool(gpu.remap_pending) or bool(gpu.retired_pending),
            "bad memory waits for a reset to be replaced",
            "no pending replacement",
            "Have the GPU reset between jobs.",
            "warning",
        ),
        (
            gpu.ecc_on is False,
            "ECC is off",
            "ECC on, or a wrong bit goes unseen",
            "Ask the administrator (nvidia-smi -e 1, then a reset).",
            "warning",
        ),
        (
            used > _MEMORY_IN_USE_BYTES,
            f"{format_bytes(used)} of its memory are in use before the job",
            "an empty GPU",
            "Look for processes of another job on the node (nvidia-smi).",
            "warning",
        ),
        (
            bool(gpu.mig_on),
            "it is split (MIG)",
            "a whole GPU, since NCCL joins no two slices",
            "Ask for whole GPUs, or have MIG switched off.",
            "warning",
        ),
    )


def _link_questions(gpu: GpuState) -> tuple[_Question, ...]:
    state, status = gpu.fabric_state, gpu.fabric_status
    return (
        (
            state in _FABRIC_UNDER_WAY,
            f"NVSwitch registration {_FABRIC_UNDER_WAY.get(state or 0, '')}",
            "completed",
            "Start nvidia-fabricmanager on the node; until then CUDA fails with error 802.",
            "fault",
        ),
        (
            state == _FABRIC_DONE and status not in (None, 0),
            f"NVSwitch registration ended with NVML error {status}",
            "success",
            "Look at the log of nvidia-fabricmanager on the node.",
            "fault",
        ),
        (
            gpu.links_up > 0 and gpu.links_down > 0,
            f"{gpu.links_down} of {gpu.links_up + gpu.links_down} NVLinks are down",
            "all links up",
            "Look at nvidia-smi nvlink --status; " + _DRAIN,
            "warning",
        ),
    )


def _speed_questions(gpu: GpuState) -> tuple[_Question, ...]:
    reasons = [text for bit, text in _THROTTLES.items() if (gpu.throttle or 0) & bit]
    clocks = f" ({gpu.clock_mhz} of {gpu.max_clock_mhz} MHz, {gpu.celsius} C)"
    return (
        (
            bool(reasons),
            f"slowed down: {', '.join(reasons)}{clocks}",
            "no slowdown",
            "Have cooling and power of the node looked at: one slow GPU slows all ranks.",
            "warning",
        ),
    )


def check_driver(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """The driver runs the CUDA that torch and NCCL were built for.

    A driver runs every CUDA of its own major version or an older one (CUDA Compatibility guide: minor version compatibility).
    """
    del handoff
    if seen.gpus is None or seen.gpus.cuda is None or seen.interpreter is None:
        return
    built = seen.interpreter.get("cuda")
    major, minor = seen.gpus.cuda // 1000, seen.gpus.cuda % 1000 // 10
    for name, version in sorted(built.items()) if isinstance(built, Mapping) else ():
        needed = str(version).partition(".")[0]
        if not needed.isdecimal():
            continue
        is_new_enough = major >= int(needed)
        yield _finding(
            seen,
            "driver",
            f"{seen.gpus.driver}, for CUDA up to {major}.{minor}",
            f"one for CUDA {version}, as {name} was built for",
            "Install a newer driver or NVIDIA's cuda-compat package, or take the job's Python for an older CUDA.",
            "ok" if is_new_enough else "fault",
        )


def _finding(
    seen: Observation, check: str, found: str, expected: str, fix: str, level: Level
) -> NodeFinding:
    return NodeFinding(
        node=seen.node,
        check=check,
        found=found,
        expected=expected,
        fix="" if level == "ok" else fix,
        level=level,
    )
