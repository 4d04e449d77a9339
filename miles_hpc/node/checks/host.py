"""The checks of one node without its GPUs: interpreter, Ray, NCCL, memory, limits, disks and files.

Each takes what was seen and what the job was promised, and returns its findings. Pure: nothing is read here.
"""

from collections.abc import Iterable
from pathlib import Path

from miles_hpc.errors import Fault
from miles_hpc.handoff import Handoff
from miles_hpc.node.checks.observation import SHM, Observation
from miles_hpc.node.nccl import NcclFound, describe_code, judge_nccl
from miles_hpc.node.ray_memory import (
    LEAST_STORE_BYTES,
    LEAST_WORKER_BYTES,
    share_bytes,
    store_bytes,
)
from miles_hpc.run.node_report import NodeFinding
from miles_hpc.units import format_bytes

# Ray's processes keep a descriptor for each peer and each mapped object, and NCCL many for each channel.
_OPEN_FILES = 65536


def check_interpreter(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """The job's Python starts, and Ray is installed for it."""
    if seen.interpreter is None:
        yield NodeFinding(
            node=seen.node,
            check="interpreter",
            found=seen.interpreter_error,
            expected=f"{handoff.python} that runs on this node",
            fix="Put the job's Python on a file system that every node sees.",
            level="fault",
        )
        return
    yield NodeFinding(
        node=seen.node,
        check="interpreter",
        found=f"Python {seen.interpreter.get('python')}",
        expected="the job's Python runs",
    )
    ray = seen.interpreter.get("ray")
    if ray is None:
        yield NodeFinding(
            node=seen.node,
            check="Ray",
            found=f"no package ray for {handoff.python}",
            expected="Ray installed beside the job's Python",
            fix="Install the node requirements there (env/ in the repository).",
            level="fault",
        )
    else:
        yield NodeFinding(
            node=seen.node, check="Ray", found=f"Ray {ray}", expected="Ray for that Python"
        )


def check_nccl(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """The pinned NCCL opens here and reports its version."""
    if handoff.nccl is None or seen.interpreter is None:
        return
    path, code = seen.interpreter.get("nccl_path"), seen.interpreter.get("nccl_code")
    found = NcclFound(
        path=None if path is None else Path(str(path)),
        version_code=code if isinstance(code, int) else None,
        error=str(seen.interpreter.get("nccl_error")),
    )
    faults = judge_nccl(handoff.nccl, found, seen.node)
    yield from from_faults(seen.node, "NCCL", faults)
    if not faults:
        wanted = describe_code(handoff.nccl.version_code)
        yield NodeFinding(node=seen.node, check="NCCL", found=wanted, expected=wanted)


def check_memory(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """The cgroup or machine gives the memory that the job asked for."""
    asked = handoff.memory_bytes
    is_enough = asked is None or seen.memory_bytes >= asked
    yield NodeFinding(
        node=seen.node,
        check="memory",
        found=f"{format_bytes(seen.memory_bytes)} ({seen.memory_source})",
        expected="any: none was asked for"
        if asked is None
        else f"{format_bytes(asked)}, as the job asked for",
        fix=""
        if is_enough
        else "Ask Slurm for this memory (cluster.memory_per_node), or lower it to what the node has.",
        level="ok" if is_enough else "fault",
    )


def check_memory_left(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Enough of that memory is free, or held by files alone, for Ray to start."""
    left = share_bytes(handoff, seen.memory_left_bytes)
    needed = LEAST_STORE_BYTES + LEAST_WORKER_BYTES
    is_enough = left >= needed
    yield NodeFinding(
        node=seen.node,
        check="memory left",
        found=f"{format_bytes(left)} ({seen.memory_left_source})",
        expected=f"{format_bytes(needed)} at least, for Ray's object store and one worker",
        fix=""
        if is_enough
        else "See what else holds memory in this cgroup or on this node, or ask Slurm for more (cluster.memory_per_node).",
        level="ok" if is_enough else "fault",
    )


def check_shared_memory(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """/dev/shm holds Ray's object store."""
    needed = store_bytes(handoff, seen.memory_left_bytes)
    is_enough = seen.shm_free_bytes >= needed
    yield NodeFinding(
        node=seen.node,
        check=str(SHM),
        found=f"{format_bytes(seen.shm_free_bytes)} free",
        expected=f"{format_bytes(needed)} for Ray's object store, which would go to a disk otherwise",
        fix=""
        if is_enough
        else "Enlarge /dev/shm (a container's --shm-size), or lower the object store in the spec.",
        level="ok" if is_enough else "fault",
    )


def check_scratch(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Offloaded tensors have a local disk with room."""
    yield from from_faults(seen.node, "scratch", seen.scratch_faults)
    if seen.scratch_root is not None:
        yield NodeFinding(
            node=seen.node,
            check="scratch",
            found=seen.scratch_look,
            expected=f"a local disk with {format_bytes(handoff.scratch.min_free_bytes)} free",
        )


def check_run_folder(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """This node may write in the run folder; that the others see it is checked between nodes."""
    del handoff
    if seen.run_folder_error:
        yield NodeFinding(
            node=seen.node,
            check="run folder",
            found=seen.run_folder_error,
            expected="a folder that every node of the job may write",
            fix="Put the run folder (job.run_root) on a shared file system that is writable on the nodes.",
            level="fault",
        )


def check_secrets(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """The head node can read the driver's secrets, and nobody else can."""
    del handoff
    yield from from_faults(seen.node, "secrets", seen.secret_faults)


def check_limits(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Locked memory is unlimited where RDMA needs it, and enough files may be open."""
    if seen.rdma_devices:
        is_unlimited = seen.memlock_bytes is None
        yield NodeFinding(
            node=seen.node,
            check="locked memory",
            found="unlimited" if seen.memlock_bytes is None else format_bytes(seen.memlock_bytes),
            expected=f"unlimited, since RDMA devices pin their buffers ({', '.join(seen.rdma_devices)})",
            fix=""
            if is_unlimited
            else "Set LimitMEMLOCK=infinity for slurmd; keep Slurm from passing on the login node's limit.",
            level="ok" if is_unlimited else "warning",
        )
    del handoff
    is_enough = seen.open_files is None or seen.open_files >= _OPEN_FILES
    yield NodeFinding(
        node=seen.node,
        check="open files",
        found="unlimited" if seen.open_files is None else str(seen.open_files),
        expected=f"at least {_OPEN_FILES} (hard limit) for Ray's and NCCL's connections",
        fix=""
        if is_enough
        else "Raise LimitNOFILE of slurmd; keep Slurm from passing on the login node's limit.",
        level="ok" if is_enough else "warning",
    )


def check_paths(seen: Observation, handoff: Handoff) -> Iterable[NodeFinding]:
    """Every model and data file that the job names can be read here."""
    del handoff
    for path, (look, why) in seen.paths.items():
        if look is not None:
            yield NodeFinding(
                node=seen.node, check="model and data", found=f"{path}: {look}", expected="readable"
            )
            continue
        yield NodeFinding(
            node=seen.node,
            check="model and data",
            found=f"{path}: {why}",
            expected="the model and data of the spec, readable on every node",
            fix="Put it on a file system that every node sees, mount it there, or correct the path in the spec.",
            level="fault",
        )


def from_faults(node: str, check: str, faults: Iterable[Fault]) -> Iterable[NodeFinding]:
    """Return the findings that say the same as `faults`."""
    for fault in faults:
        yield NodeFinding(
            node=node,
            check=check,
            found=fault.found,
            expected=fault.expected,
            fix=fault.fix,
            level="fault",
        )
