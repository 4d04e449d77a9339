"""Is this node fit to run the job? Every fault is found before anything is started, and all are reported at once.

Checks: the run folder, the job's interpreter with Ray, NCCL, scratch, memory, /dev/shm, GPUs, the address, the clock. Runs
one probe with the job's interpreter; changes nothing.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.filesystem import free_bytes
from miles_hpc.node.context import NodeContext
from miles_hpc.node.environment import without_foreign_settings
from miles_hpc.node.memory import memory_limit_bytes
from miles_hpc.node.nccl import NcclFound, judge_nccl
from miles_hpc.node.scratch import choose_scratch_root
from miles_hpc.process import run_short
from miles_hpc.run.events import Kind
from miles_hpc.secret_store import read_secrets
from miles_hpc.units import format_bytes

# The first import of an interpreter from a busy network file system takes that long.
_PROBE_TIMEOUT_S = 120.0
_CLOCK_SKEW_S = 5.0
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What preflight found out and later stages need.

    Attributes:
        nccl: the library that was checked; None when the job has no pin.
        memory_bytes: what this job may use here, by cgroup or machine.
        ray_client: Ray's client server would start and needs a port of its own.
    """

    scratch_root: Path
    nccl: Path | None
    nccl_code: int | None
    memory_bytes: int
    python_version: str
    ray_version: str
    ray_client: bool


def check_node(context: NodeContext, environ: Mapping[str, str]) -> NodeFacts:
    """Return the facts of a node that is fit.

    Raises:
        PreflightError: with every fault, one a line.
    """
    start_s = time.monotonic()
    node = context.node
    report, faults = _ask_interpreter(context, environ)
    scratch_root, scratch_faults = choose_scratch_root(context.handoff.scratch, environ, node)
    faults += scratch_faults
    memory, memory_faults = _check_memory(context)
    faults += memory_faults + _check_run_folder(context) + _check_shared_memory(context)
    faults += _check_gpus(context, environ) + _check_secrets(context)
    if faults or scratch_root is None:
        raise PreflightError("\n".join(sorted(str(fault) for fault in faults)))
    path = report.get("nccl_path")
    code = report.get("nccl_code")
    facts = NodeFacts(
        scratch_root=scratch_root,
        nccl=Path(str(path)) if path is not None else None,
        nccl_code=code if isinstance(code, int) else None,
        memory_bytes=memory,
        python_version=str(report.get("python")),
        ray_version=str(report.get("ray")),
        ray_client=bool(report.get("ray_client")),
    )
    context.events.append(
        Kind.PREFLIGHT,
        seconds=round(time.monotonic() - start_s, 3),
        python=facts.python_version,
        ray=facts.ray_version,
        memory_bytes=memory,
        scratch_root=str(scratch_root),
    )
    if facts.nccl is not None:
        context.events.append(Kind.NCCL, path=str(facts.nccl), version_code=facts.nccl_code)
    return facts


def _ask_interpreter(
    context: NodeContext, environ: Mapping[str, str]
) -> tuple[dict[str, object], tuple[Fault, ...]]:
    handoff, node = context.handoff, context.node
    argument = ["--no-nccl"]
    if handoff.nccl is not None:
        argument = [] if handoff.nccl.path is None else [handoff.nccl.path]
    done = run_short(
        [handoff.python, "-m", "miles_hpc.probe.interpreter", *argument],
        timeout_s=_PROBE_TIMEOUT_S,
        environ={**without_foreign_settings(environ), "PYTHONPATH": handoff.code_dir},
    )
    try:
        report = json.loads(done.stdout) if done.ok else None
    except ValueError:
        report = None
    if not isinstance(report, dict):
        fault = Fault(
            where=f"{node}: interpreter",
            found=done.describe(),
            expected=f"{handoff.python} that runs on this node",
            fix="Put the job's Python on a file system that every node sees.",
        )
        return {}, (fault,)
    faults: tuple[Fault, ...] = ()
    if report.get("ray") is None:
        fault = Fault(
            where=f"{node}: Ray",
            found=f"no package ray for {handoff.python}",
            expected="Ray installed beside the job's Python",
            fix="Install the node requirements there (env/ in the repository).",
        )
        faults += (fault,)
    if handoff.nccl is not None:
        path, code = report.get("nccl_path"), report.get("nccl_code")
        found = NcclFound(
            path=Path(str(path)) if path is not None else None,
            version_code=code if isinstance(code, int) else None,
            error=str(report.get("nccl_error")),
        )
        faults += judge_nccl(handoff.nccl, found, node)
    return report, faults


def _check_memory(context: NodeContext) -> tuple[int, tuple[Fault, ...]]:
    limit, where = memory_limit_bytes()
    asked = context.handoff.memory_bytes
    if asked is None or limit >= asked:
        return limit, ()
    fault = Fault(
        where=f"{context.node}: memory",
        found=f"{format_bytes(limit)} ({where})",
        expected=f"{format_bytes(asked)}, as the job asked for",
        fix="Ask Slurm for this memory (cluster.mem), or lower it to what the node has.",
    )
    return limit, (fault,)


def _check_secrets(context: NodeContext) -> tuple[Fault, ...]:
    if context.handoff.secrets is None or not context.is_head:
        return ()
    return read_secrets(context.handoff.secrets, f"{context.node}: secrets")[1]


def _check_run_folder(context: NodeContext) -> tuple[Fault, ...]:
    try:
        with tempfile.NamedTemporaryFile(dir=context.rendezvous.root, prefix=".probe-"):
            return ()
    except OSError as error:
        return (
            Fault(
                where=f"{context.node}: run folder",
                found=f"{context.rendezvous.root}: {error.strerror}",
                expected="a folder that every node of the job may write",
                fix="Put the run folder on a shared file system that is writable on the nodes.",
            ),
        )


def _check_shared_memory(context: NodeContext) -> tuple[Fault, ...]:
    needed = context.handoff.object_store_bytes
    free = free_bytes(_SHM) if _SHM.is_dir() else 0
    if free >= needed:
        return ()
    return (
        Fault(
            where=f"{context.node}: {_SHM}",
            found=f"{format_bytes(free)} free",
            expected=f"{format_bytes(needed)} for Ray's object store, which would go to a disk otherwise",
            fix="Enlarge /dev/shm (a container's --shm-size), or lower the object store in the spec.",
        ),
    )


def _check_gpus(context: NodeContext, environ: Mapping[str, str]) -> tuple[Fault, ...]:
    needed = context.handoff.gpus_per_node
    if needed == 0:
        return ()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([entry for entry in visible.split(",") if entry.strip()])
        found = f"{count} in CUDA_VISIBLE_DEVICES={visible}"
    else:
        count = sum(1 for entry in Path("/dev").glob("nvidia[0-9]*") if os.access(entry, os.R_OK))
        found = f"{count} readable /dev/nvidia*"
    if count >= needed:
        return ()
    return (
        Fault(
            where=f"{context.node}: GPUs",
            found=found,
            expected=f"{needed} GPUs on each node",
            fix="Ask Slurm for them (cluster.gpus_per_node and the site's GRES style).",
        ),
    )


def check_clock(context: NodeContext, head_time_s: float) -> None:
    """Warn when this node's clock is behind the head's: events would be merged in the wrong order."""
    behind_s = head_time_s - time.time()
    if behind_s > _CLOCK_SKEW_S:
        context.events.append(
            Kind.WARNING, message=f"clock of {context.node} is {behind_s:.1f} s behind the head's"
        )
