"""The end of an attempt on one node: driver, then Ray, then every process, file and socket of this job.

Workers stop their Ray before the head does: a head that goes first leaves the raylets waiting for it. Runs to its end
whatever failed before; decides no verdict.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.node.context import NodeContext
from miles_hpc.node.host_memory import OomWatch
from miles_hpc.node.scratch import JobFolder
from miles_hpc.node.supervise import POLL_S, Child
from miles_hpc.node.survivors import end_survivors, has_living_children, owned_processes
from miles_hpc.run.events import Kind

_RAY_GRACE_S = 10.0
_SURVIVOR_GRACE_S = 2.0
# What a worker needs at most: Ray's own end, the survivors' and copying logs.
_WORKERS_GONE_S = 20.0
_LOG_SIZE_LIMIT_BYTES = 64 << 20


@dataclass(slots=True)
class NodeResources:
    """What this agent has started and made; filled as the start proceeds, emptied by the teardown."""

    on_change: Callable[[tuple[Path, ...]], None]
    oom: OomWatch = field(default_factory=lambda: OomWatch(cgroup=None, before=0))
    driver: Child | None = None
    ray: Child | None = None
    probe: Child | None = None
    ray_temp: JobFolder | None = None
    scratch: JobFolder | None = None

    def changed(self) -> None:
        """Leave word of the folders that exist now."""
        folders = (folder.path for folder in (self.ray_temp, self.scratch) if folder is not None)
        self.on_change(tuple(folders))

    def children(self) -> tuple[Child, ...]:
        """Return the children that were started."""
        return tuple(child for child in (self.driver, self.ray, self.probe) if child is not None)


def stop_driver(context: NodeContext, resources: NodeResources) -> int | None:
    """End the driver and what it started; return its exit code, None when it never ran.

    What a driver that ended by itself has left running may be writing a checkpoint, so it gets the grace without a signal.
    A second signal to the agent ends the grace.
    """
    driver = resources.driver
    if driver is None:
        return None
    grace_s = context.handoff.stop_grace_s
    code = driver.poll()
    if code is None:
        code = driver.terminate(
            grace_s=grace_s, whole_group=True, cut=lambda: context.stop.count > 1
        )
    end_s = time.monotonic() + grace_s
    while _session_alive(driver.process.pid) and time.monotonic() < end_s:
        if context.stop.count > 0:
            break
        time.sleep(POLL_S)
    return code


def stop_node(context: NodeContext, resources: NodeResources) -> None:
    """Stop this node's Ray, end every process of the job here, keep Ray's logs and remove the job's folders."""
    start_s = time.monotonic()
    shared = shared_memory_files(owned_processes(context.job_tag))
    if resources.ray is not None:
        stop_ray(resources.ray)
    if resources.probe is not None:
        resources.probe.terminate(grace_s=0.0)
    killed = end_survivors(context.job_tag, resources.children(), grace_s=_SURVIVOR_GRACE_S)
    remove_unused(shared)
    if resources.ray_temp is not None:
        copy_ray_logs(resources.ray_temp.path, context.attempt.ray_logs(context.node))
        resources.ray_temp.remove()
    if resources.scratch is not None:
        resources.scratch.remove()
    context.events.append(
        Kind.TEARDOWN, seconds=round(time.monotonic() - start_s, 3), killed=list(killed)
    )


def stop_ray(ray: Child) -> None:
    """End Ray's launcher, which ends its own children in order.

    Signalled with them at once, or while it starts, it may wait for seconds after they have gone; without children it has
    nothing left to do.
    """
    leader = ray.process.pid
    ray.terminate(grace_s=_RAY_GRACE_S, cut=lambda: not has_living_children(leader))


def wait_for_workers(
    context: NodeContext, *, deadline_s: float = _WORKERS_GONE_S
) -> tuple[str, ...]:
    """Wait until every other node that ever reported has stopped its Ray; return those that did not say so in time."""
    end_s = time.monotonic() + deadline_s
    while True:
        gone = context.rendezvous.gone()
        late = tuple(
            node
            for node in context.identity.nodes[1:]
            if node not in gone and context.attempt.node_events(node).exists()
        )
        if not late or time.monotonic() >= end_s or context.stop.count > 1:
            return late
        time.sleep(POLL_S)


def copy_ray_logs(ray_temp: Path, target: Path) -> None:
    """Copy the log files of each Ray session below `ray_temp`; the ends of very long ones are kept."""
    for session in sorted(ray_temp.glob("session_2*")):
        for path in sorted((session / "logs").rglob("*")):
            if not path.is_file() or path.is_symlink() or path.stat().st_size == 0:
                continue
            copy = target / path.relative_to(session / "logs")
            copy.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, copy.open("wb") as sink:
                source.seek(max(0, path.stat().st_size - _LOG_SIZE_LIMIT_BYTES))
                shutil.copyfileobj(source, sink)


def shared_memory_files(pids: frozenset[int]) -> tuple[Path, ...]:
    """Return the files in /dev/shm that the processes `pids` map; a killed process leaves them behind."""
    found: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name = line.split(maxsplit=5)[-1]
            if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):
                found.add(Path(name))
    return tuple(sorted(found))


def remove_unused(shared: Sequence[Path]) -> None:
    """Remove the files in /dev/shm that this job's processes mapped, unless another process maps them too."""
    if not shared:
        return
    pids = frozenset(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    in_use = frozenset(shared_memory_files(pids))
    for path in shared:
        if path not in in_use:
            with contextlib.suppress(OSError):
                path.unlink()


def _session_alive(leader: int) -> bool:
    """Say whether any process of the session that `leader` led still runs."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[3]) == leader:
            return True
    return False
