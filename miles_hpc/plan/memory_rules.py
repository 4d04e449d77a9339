"""The rules about memory: what a plan needs against what a node, a GPU and a scratch disk have.

The sums are `memory`; these rules judge them, and only where the spec names the limit.
"""

from collections.abc import Iterator, Sequence

from miles_hpc.plan.batch import longest_sample_tokens
from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.footprint import engine_footprint
from miles_hpc.plan.memory import ALARM_FRACTION
from miles_hpc.plan.phases import MemoryPlan, Phase
from miles_hpc.plan.shape import count_params
from miles_hpc.plan.sides import DEFAULT_MEM_FRACTION, cache_pool_bytes
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule
from miles_hpc.units import format_bytes

SCRATCH_MARGIN = 1.1
"""Free space asked for over what is written: file system metadata and blocks that are not reused at once."""

HOST = Rule(
    id="MH301",
    title="host memory for every phase",
    reason="A host that runs out of memory kills one process, and with it the job. On colocated nodes one backup may be in"
    " host memory at a time; a second one, or a pinned copy beside it, is what fills them.",
    arithmetic=f"largest phase <= {ALARM_FRACTION} * min(node_memory, memory_per_node), the page cache left out",
    source="radixark/miles docs/models/qwen/qwen3-8.md section 6 (alarm at 750 of 956 GB); docs/memory.md",
)
GPU = Rule(
    id="MH302",
    title="GPU memory for every phase",
    reason="Both sides take turns on a GPU; in the handoff their weights may overlap there.",
    arithmetic="largest phase <= gpu_memory",
    source="docs/memory.md",
)
CACHE = Rule(
    id="MH303",
    title="a cache that holds the longest sample",
    reason="What a rollout engine's memory fraction leaves beside its weights is its cache; a sample that does not fit is"
    " never finished.",
    arithmetic="mem_fraction_static * gpu_memory - engine weights >= longest sample * cache bytes a token",
    source="SGLang --mem-fraction-static; docs/memory.md",
)
SCRATCH = Rule(
    id="MH304",
    title="scratch space is asked for",
    reason="Preflight checks that offload.scratch_min_free is free on every node before anything starts; asked for less"
    " than is written, the disk fills at the first offload instead. Streamed optimizer state takes its size twice.",
    arithmetic=f"scratch_min_free >= {SCRATCH_MARGIN} * (paused + 2 * streamed bytes of a rank) * ranks_per_node",
    source="docs/memory.md",
)
PARAMETERS = Rule(
    id="MH305",
    title="a total that holds the parts",
    reason="model.total_params is the published total; below what the shape alone gives, one of the two is wrong.",
    arithmetic="total_params >= parameters counted from the shape",
    source="docs/memory.md",
)
MEMORY_RULES = (HOST, GPU, CACHE, SCRATCH, PARAMETERS)


def memory_checks(memory: MemoryPlan) -> Sequence[Check]:
    """Return the memory rules as checks of the spec that `memory` was planned for."""
    return (
        Check(HOST, lambda _: _host(memory)),
        Check(GPU, lambda _: _gpu(memory)),
        Check(CACHE, _cache),
        Check(SCRATCH, lambda _: _scratch(memory)),
        Check(PARAMETERS, _parameters),
    )


def _sum_text(phase: Phase, place: str) -> str:
    parts = sorted(
        (
            (count, name.removeprefix(f"{place}."))
            for name, count in phase.parts.items()
            if name.startswith(f"{place}.") and name != "host.page_cache"
        ),
        reverse=True,
    )
    return " + ".join(f"{name}({format_bytes(count)})" for count, name in parts)


def _host(memory: MemoryPlan) -> Iterator[Verdict]:
    alarm, limit = memory.alarm_host_bytes_per_node, memory.limits.host_bytes_per_node
    if alarm is None or limit is None:
        return
    for peak in memory.host_peaks:
        if peak.committed_host_bytes > alarm:
            yield _host_verdict(memory, peak, limit, alarm)


def _host_verdict(memory: MemoryPlan, peak: Phase, limit: int, alarm: int) -> Verdict:
    both = {"host.trainer_backup", "host.engine_backup"} <= peak.parts.keys()
    fix = (
        'Set offload.peak_device = "gpu" or offload.train = "disk".'
        if both
        else "Use more nodes, or nodes with more memory."
    )
    return Verdict(
        keys=("cluster.node_memory", "offload.train", "offload.rollout", "cluster.memory_per_node"),
        found=f"phase {peak.name}{memory.place(peak)}: {_sum_text(peak, 'host')}"
        f" = {format_bytes(peak.committed_host_bytes)} a node, above"
        f" {ALARM_FRACTION} * {format_bytes(limit)} = {format_bytes(alarm)}",
        expected="every phase below the alarm",
        fix=fix,
    )


def _gpu(memory: MemoryPlan) -> Iterator[Verdict]:
    limit = memory.limits.gpu_bytes_per_gpu
    if limit is None:
        return
    for peak in memory.gpu_peaks:
        if peak.gpu_bytes_per_gpu > limit:
            yield _gpu_verdict(memory, peak, limit)


def _gpu_verdict(memory: MemoryPlan, peak: Phase, limit: int) -> Verdict:
    fixes = {
        "train": "Split the model over more ranks, lower train.max_tokens_per_gpu, or recompute activations.",
        "rollout": "Lower rollout.mem_fraction_static.",
        "handoff": 'Set offload.peak_device = "cpu", or split the model over more ranks.',
    }
    is_rollout = peak.name == "rollout" or peak in memory.rollout_phases
    return Verdict(
        keys=("cluster.gpu_memory", "cluster.num_nodes", "parallel.ep", "parallel.tp"),
        found=f"phase {peak.name}{memory.place(peak)}: {_sum_text(peak, 'gpu')}"
        f" = {format_bytes(peak.gpu_bytes_per_gpu)} a GPU, above gpu_memory({format_bytes(limit)})",
        expected="every phase to fit a GPU",
        fix=fixes["rollout"]
        if is_rollout
        else fixes.get(peak.name, "Split the model over more ranks."),
    )


def _cache(spec: JobSpec) -> Iterator[Verdict]:
    memory, engine = spec.cluster.gpu_memory, engine_footprint(spec)
    if spec.cluster.device == "cpu" or memory is None or spec.rollout.engine != "sglang":
        return
    pool, longest = cache_pool_bytes(spec), longest_sample_tokens(spec)
    wanted = longest * engine.cache_bytes_per_token
    if pool >= wanted:
        return
    fraction = spec.rollout.mem_fraction_static or DEFAULT_MEM_FRACTION
    yield Verdict(
        keys=(
            "rollout.mem_fraction_static",
            "rollout.gpus_per_engine",
            "rollout.max_response_tokens",
        ),
        found=f"mem_fraction_static({fraction:g}) * gpu_memory({format_bytes(memory)}) - engine weights"
        f"({format_bytes(engine.weights)}) leaves {format_bytes(pool)} of cache",
        expected=f"{longest} tokens * {engine.cache_bytes_per_token} B = {format_bytes(wanted)} for one longest sample",
        fix="Raise rollout.gpus_per_engine or rollout.mem_fraction_static.",
    )


def _scratch(memory: MemoryPlan) -> Iterator[Verdict]:
    have = memory.limits.scratch_bytes_per_node
    written = max(phase.scratch_bytes_per_node for phase in memory.everywhere)
    wanted = round(SCRATCH_MARGIN * written)
    if have is None or have >= wanted:
        return
    yield Verdict(
        keys=("offload.scratch_min_free", "offload.train"),
        found=f"{SCRATCH_MARGIN} * {format_bytes(written)} = {format_bytes(wanted)} of scratch a node, above"
        f" scratch_min_free({format_bytes(have)})",
        expected="the space that is written to be asked for",
        fix=f'Set offload.scratch_min_free = "{-(-wanted // 2**30)}GiB".',
    )


def _parameters(spec: JobSpec) -> Iterator[Verdict]:
    total, listed = spec.model.total_params, count_params(spec.model).listed
    if total is not None and total < listed:
        yield Verdict(
            keys=("model.total_params", "model.num_layers", "model.num_experts"),
            found=f"total_params({total / 1e9:.1f}e9) below the {listed / 1e9:.1f}e9 that the shape alone gives",
            expected="the published total to hold at least these",
            fix="Correct the shape or the total from the model's config.json.",
        )
