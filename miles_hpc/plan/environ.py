"""The environment table: every variable of the job's processes with its reason and source, and the rules about it.

Knows what can be known at submission. What only a node knows (addresses, interfaces behind a pattern, cache and scratch
folders, the NCCL file) is the node agent's; what only one engine needs is the engine's.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.plan import EnvVar
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

ALLOCATOR = "garbage_collection_threshold:0.8,max_split_size_mb:512"
ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_MILES = "radixark/miles 31f1ca961"
_REPLACEABLE = frozenset({*ALLOCATOR_NAMES, "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_"})
"""What a user may set otherwise without breaking what the package relies on."""


def make_environment(spec: JobSpec) -> tuple[EnvVar, ...]:
    """Return the variables of the job's processes, the user's [env] last."""
    ours = [
        *_python(),
        *_ray(),
        *_host_memory(),
        *_offline(),
        *(_gpu() if spec.cluster.device == "gpu" else _cpu(spec)),
        *_network(spec),
    ]
    return (
        *(variable for variable in ours if not _replaced(variable.name, spec)),
        *(
            EnvVar(name=name, value=value, why="set in [env] of the spec", source="spec")
            for name, value in spec.env.items()
        ),
    )


def _replaced(name: str, spec: JobSpec) -> bool:
    if name in ALLOCATOR_NAMES:
        return any(other in spec.env for other in ALLOCATOR_NAMES)
    return name in spec.env


def _python() -> Iterator[EnvVar]:
    yield EnvVar(
        name="PYTHONUNBUFFERED",
        value="1",
        why="the last lines of a process that dies must be in its log",
        source="Python manual, command line and environment",
    )
    yield EnvVar(
        name="PYTHONNOUSERSITE",
        value="1",
        why="packages in the user's home would shadow the pinned ones on every node",
        source="Python manual, command line and environment",
    )


def _ray() -> Iterator[EnvVar]:
    yield EnvVar(
        name="RAY_USAGE_STATS_ENABLED",
        value="0",
        why="compute nodes have no way out and a job should not report itself",
        source="Ray manual, usage statistics",
    )
    yield EnvVar(
        name="RAY_memory_monitor_refresh_ms",
        value="0",
        why="Ray kills a worker when the node is 95 % full, page cache included; here one lost rank loses the job, and"
        " large colocated hosts are planned to run that full",
        source=f"Ray manual, out-of-memory prevention; {_MILES} docs",
    )
    yield EnvVar(
        name="RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S",
        value="0",
        why="a raylet that is told to end would first drain for up to 30 s while the allocation is billed",
        source="measured with Ray 2.60: teardown of 4 nodes",
    )
    yield EnvVar(
        name="RAY_DEDUP_LOGS",
        value="0",
        why="lines that differ by rank alone are the evidence when a rank fails",
        source=f"Ray manual, log deduplication; {_MILES} docs",
    )


def _host_memory() -> Iterator[EnvVar]:
    yield EnvVar(
        name="MALLOC_ARENA_MAX",
        value="2",
        why="glibc keeps freed memory in one arena for each thread; offloaded weights must really leave host memory",
        source="mallopt(3), M_ARENA_MAX",
    )
    yield EnvVar(
        name="MALLOC_TRIM_THRESHOLD_",
        value="131072",
        why="a fixed threshold also stops glibc from raising its mmap threshold, so that freed tensors go back to the"
        " kernel at once",
        source="mallopt(3), M_TRIM_THRESHOLD and M_MMAP_THRESHOLD",
    )


def _offline() -> Iterator[EnvVar]:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        yield EnvVar(
            name=name,
            value="1",
            why="a run reads the files that its spec names; thousands of ranks asking a hub is neither fast nor repeatable",
            source="huggingface_hub manual, environment variables",
        )
    yield EnvVar(
        name="TOKENIZERS_PARALLELISM",
        value="false",
        why="the tokenizer's thread pool competes with the ranks for CPUs and does not survive a fork",
        source="Hugging Face tokenizers README",
    )


def _gpu() -> Iterator[EnvVar]:
    yield EnvVar(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        value="1",
        why="Megatron orders communication before computation by issuing both through one hardware queue",
        source=f"megatron-core 0.16.1 core/model_parallel_config.py; {_MILES} miles/utils/external_utils/command_utils.py",
    )
    yield EnvVar(
        name="PYTORCH_CUDA_ALLOC_CONF",
        value=ALLOCATOR,
        why="fragmentation is held down without expandable_segments, under which pausing a colocated side frees nothing",
        source=f"{_MILES} examples/swe-agent-harbor-docker/run_glm52_lora_tb2_daytona.py; measured, torch_memory_saver 0.0.10",
    )


def _cpu(spec: JobSpec) -> Iterator[EnvVar]:
    native = spec.engine.native
    threads = 1 if native is None else native.threads_per_rank
    yield EnvVar(
        name="OMP_NUM_THREADS",
        value=str(threads),
        why="engine.native.threads_per_rank; without it every rank starts one thread for each CPU of the machine",
        source="torch manual, CPU threading",
    )
    yield EnvVar(
        name="CUDA_VISIBLE_DEVICES",
        value="",
        why='device = "cpu" means no GPU, also on a machine that has one',
        source="CUDA programming guide, environment variables",
    )


def _network(spec: JobSpec) -> Iterator[EnvVar]:
    interface = spec.network.interface
    if interface is not None and is_plain_interface(interface):
        yield EnvVar(
            name="GLOO_SOCKET_IFNAME",
            value=interface,
            why="network.interface; Gloo wants one existing name",
            source="torch manual, distributed: choosing the network interface",
        )
        if spec.cluster.device == "gpu":
            yield EnvVar(
                name="NCCL_SOCKET_IFNAME",
                value=f"={interface}",
                why="network.interface; the = asks for exactly this name, where NCCL would else take it as a prefix",
                source="NCCL manual, NCCL_SOCKET_IFNAME",
            )
    if spec.cluster.device == "gpu" and spec.network.ib_hca is not None:
        yield EnvVar(
            name="NCCL_IB_HCA",
            value=spec.network.ib_hca,
            why="network.ib_hca",
            source="NCCL manual, NCCL_IB_HCA",
        )
    if spec.nccl.debug is not None:
        yield EnvVar(
            name="NCCL_DEBUG",
            value=spec.nccl.debug,
            why="nccl.debug",
            source="NCCL manual, NCCL_DEBUG",
        )


def is_plain_interface(interface: str) -> bool:
    """Tell whether `interface` is one name, not a pattern or subnet that each node must resolve for Gloo and Ray."""
    return not interface.startswith(("^", "=")) and "," not in interface and "/" not in interface


def _owned_names(spec: JobSpec) -> Iterator[Verdict]:
    everywhere = (*_python(), *_ray(), *_offline(), *_gpu(), *_cpu(spec))
    ours = {variable.name: variable for variable in everywhere}
    for name in spec.env:
        if name in ours.keys() - _REPLACEABLE:
            yield Verdict(
                keys=(f"env.{name}",),
                found=f"{name} in [env]",
                expected=f"a variable that this table does not set itself ({ours[name].why})",
                fix="Remove it from [env].",
            )


def _trap_names(spec: JobSpec) -> Iterator[Verdict]:
    for name in spec.env:
        text = TRAPS.get(name) or (LAUNCHER_TRAP if name.startswith(LAUNCHER_PREFIX) else None)
        if text is not None:
            yield Verdict(
                keys=(f"env.{name}",),
                found=f"{name} in [env]",
                expected=text,
                fix="Remove it from [env].",
            )


TRAPS = {
    "MILES_TRAIN_MEMORY_FRACTION": "a variable that something reads; this one has no reader",
    "MILES_BACKEND": "a variable of this Miles; it raises an error on the removed one",
    "MILES_HOST_IP": "every node to find its own address; set for a whole job, each node would use the head's",
    "SCRATCH": "offload.scratch_root, which is checked on every node; Miles would make a folder of the user below this one",
    "DEPRECATED_MEGATRON_COMPATIBLE": "nothing of a removed compatibility mode",
    "NCCL_VERSION": "the version that the library reports; this variable is only a note that container images leave",
}

LAUNCHER_PREFIX = "MILES_SCRIPT_"
LAUNCHER_TRAP = "no settings of Miles' launch scripts: the package starts train.py itself, which does not read them"

ENVIRONMENT_CHECKS = (
    Check(
        Rule(
            id="MH402",
            fixed=True,
            title="variables with one owner",
            reason="A variable that is set twice has one value that its reader did not expect.",
            source="docs/reference/environment.md",
        ),
        _owned_names,
    ),
    Check(
        Rule(
            id="MH404",
            title="variables that do what their name says",
            reason="Some names are remnants or act job-wide where a node's own value is needed.",
            source=f"{_MILES} miles/utils/http_utils.py:70; grep of the repository",
        ),
        _trap_names,
    ),
)
