"""What one node's checks look at, gathered once: everything here reads, nothing judges.

Two probes run in children, side by side: the job's interpreter, and the GPUs' driver, which may hang when it is sick. All
else is read in this process. Leaves nothing behind.
"""

import hashlib
import json
import os
import resource
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miles_hpc.errors import Fault
from miles_hpc.filesystem import describe_path, free_bytes
from miles_hpc.handoff import Handoff
from miles_hpc.node.context import NodeContext
from miles_hpc.node.environment import without_foreign_settings
from miles_hpc.node.memory import memory_left_bytes, memory_limit_bytes
from miles_hpc.node.scratch import choose_scratch_root
from miles_hpc.process import Completed, run_short
from miles_hpc.run.gpu_state import GpuReport, gpu_report_from
from miles_hpc.secret_store import read_secrets
from miles_hpc.units import format_bytes

# The first import of an interpreter from a busy network file system takes that long.
_PROBE_TIMEOUT_S = 120.0
_Answer = TypeVar("_Answer")
SHM = Path("/dev/shm")
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One node as its checks see it.

    Attributes:
        interpreter: what the probe of the job's interpreter printed; None when it did not run.
        interpreter_error: why it did not.
        gpus: None for a job without GPUs.
        scratch_look: what holds `scratch_root`; empty without one.
        visible_gpus: how many GPUs the scheduler gave to this job here, and where that stands.
        memlock_bytes / open_files: hard limits; None is unlimited.
        rdma_devices: names of the InfiniBand or RoCE devices.
        paths: each file or folder that the job needs: what it looks like, or None and why it cannot be read.
        code: digest of the frozen package as this node sees it.
    """

    node: str
    interpreter: Mapping[str, object] | None
    interpreter_error: str
    gpus: GpuReport | None
    visible_gpus: tuple[int, str]
    memory_bytes: int
    memory_source: str
    memory_left_bytes: int
    memory_left_source: str
    scratch_root: Path | None
    scratch_look: str
    scratch_faults: tuple[Fault, ...]
    secret_faults: tuple[Fault, ...]
    run_folder_error: str
    shm_free_bytes: int
    memlock_bytes: int | None
    open_files: int | None
    rdma_devices: tuple[str, ...]
    paths: Mapping[str, tuple[str | None, str]]
    code: str


def observe(context: NodeContext, environ: Mapping[str, str]) -> Observation:
    """Look at this node."""
    handoff = context.handoff
    interpreter_answer = _ask(lambda: _ask_interpreter(handoff, environ))
    gpu_answer = _ask(lambda: _ask_gpus(handoff, environ)) if handoff.gpus_per_node else None
    scratch_root, scratch_faults = choose_scratch_root(handoff.scratch, environ, context.node)
    memory, memory_source = memory_limit_bytes()
    memory_left, memory_left_source = memory_left_bytes()
    paths = {path: look_at(Path(path)) for path in handoff.needed_paths}
    code = code_digest(Path(handoff.code_dir))
    secret_faults = _secret_faults(context)
    interpreter, interpreter_error = interpreter_answer()
    return Observation(
        node=context.node,
        interpreter=interpreter,
        interpreter_error=interpreter_error,
        gpus=None if gpu_answer is None else gpu_answer(),
        visible_gpus=count_visible_gpus(environ, is_local=handoff.cluster == "local"),
        memory_bytes=memory,
        memory_source=memory_source,
        memory_left_bytes=memory_left,
        memory_left_source=memory_left_source,
        scratch_root=scratch_root,
        scratch_look="" if scratch_root is None else look_at_disk(scratch_root),
        scratch_faults=scratch_faults,
        secret_faults=secret_faults,
        run_folder_error=_try_to_write(context.rendezvous.root),
        shm_free_bytes=free_bytes(SHM) if SHM.is_dir() else 0,
        memlock_bytes=_hard_limit(resource.RLIMIT_MEMLOCK),
        open_files=_hard_limit(resource.RLIMIT_NOFILE),
        rdma_devices=tuple(sorted(entry.name for entry in _RDMA_DEVICES.glob("*"))),
        paths=paths,
        code=code,
    )


def _ask(question: Callable[[], _Answer]) -> Callable[[], _Answer]:
    """Ask in a thread of its own; the function that is returned waits for the answer."""
    answers: list[_Answer] = []
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()

    def wait() -> _Answer:
        thread.join()
        return answers[0]

    return wait


def _ask_interpreter(
    handoff: Handoff, environ: Mapping[str, str]
) -> tuple[Mapping[str, object] | None, str]:
    argument = ["--no-nccl"]
    if handoff.nccl is not None:
        argument = [] if handoff.nccl.path is None else [handoff.nccl.path]
    done = _run_probe(handoff, environ, "interpreter", *argument)
    report = _object_in(done)
    return report, "" if report is not None else done.describe()


def _ask_gpus(handoff: Handoff, environ: Mapping[str, str]) -> GpuReport:
    done = _run_probe(handoff, environ, "gpus")
    report = _object_in(done)
    try:
        return GpuReport(error=done.describe()) if report is None else gpu_report_from(report)
    except TypeError as error:
        return GpuReport(error=f"another version of the probe answered: {error}")


def _run_probe(
    handoff: Handoff, environ: Mapping[str, str], name: str, *arguments: str
) -> Completed:
    return run_short(
        [handoff.python, "-m", f"miles_hpc.probe.{name}", *arguments],
        timeout_s=_PROBE_TIMEOUT_S,
        environ={**without_foreign_settings(environ), "PYTHONPATH": handoff.code_dir},
    )


def _object_in(done: Completed) -> Mapping[str, object] | None:
    try:
        report = json.loads(done.stdout) if done.ok else None
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def count_visible_gpus(environ: Mapping[str, str], *, is_local: bool) -> tuple[int, str]:
    """Return how many GPUs this job may use here, and where that was read.

    On the local cluster the variable only repeats what was asked for.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not is_local:
        count = len([entry for entry in visible.split(",") if entry.strip()])
        return count, f"CUDA_VISIBLE_DEVICES={visible}"
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sum(1 for entry in devices if os.access(entry, os.R_OK)), "readable /dev/nvidia*"


def look_at(path: Path) -> tuple[str | None, str]:
    """Return what tells two nodes' copies of `path` apart; None and the reason when it cannot be read."""
    try:
        if not path.is_dir():
            with path.open("rb"):
                return f"a file of {path.stat().st_size} bytes", ""
        entries = [entry for entry in os.scandir(path) if not entry.name.startswith(".")]
        total_bytes = sum(entry.stat().st_size for entry in entries if entry.is_file())
    except OSError as error:
        return None, error.strerror or str(error)
    if not entries:
        return None, "an empty folder"
    return f"{len(entries)} entries, {total_bytes} bytes in its files", ""


def look_at_disk(folder: Path) -> str:
    """Return which file system holds `folder` and what is free there."""
    mount = describe_path(folder).mount
    return f"{folder}: {mount.fs_type} on {mount.source}, {format_bytes(free_bytes(folder))} free"


def code_digest(code: Path) -> str:
    """Return a digest of the names and sizes of the frozen package.

    Sizes tell a stale view of a network file system from the right one and cost no reading.
    """
    digest = hashlib.sha256()
    package = code / "miles_hpc"
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:12]


def _try_to_write(folder: Path) -> str:
    """Return why `folder` cannot be written; empty when it can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _secret_faults(context: NodeContext) -> tuple[Fault, ...]:
    if context.handoff.secrets is None or not context.is_head:
        return ()
    return read_secrets(context.handoff.secrets, f"{context.node}: secrets")[1]


def _hard_limit(kind: int) -> int | None:
    hard = resource.getrlimit(kind)[1]
    return None if hard == resource.RLIM_INFINITY else hard
