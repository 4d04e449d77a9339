"""Host memory of this job on this node: from the job's cgroup (v1 or v2), or summed over its own processes.

Reads files under two roots, so that tests can give it recorded trees. Knows no plan and no phase.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.node.memory import memory_cgroups
from miles_hpc.run.samples import HostMemory

_STATUS_KEYS = (b"RssAnon:", b"RssFile:", b"RssShmem:", b"VmLck:", b"VmPin:")


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A memory cgroup and the version of its files."""

    folder: Path
    version: int

    def read(self) -> HostMemory:
        """Return what the cgroup and those below it hold now.

        Both kernels count shared memory among the file pages; here it is apart.

        Raises:
            OSError: if the cgroup is gone.

        Source: "memory.stat" in the kernel's guides to cgroup v2 and v1.
        """
        stat = {}
        for line in (self.folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if value.isdecimal():
                stat[name] = int(value)
        if self.version == 1:
            shmem = stat.get("total_shmem", 0)
            anon, cache = stat.get("total_rss", 0), stat.get("total_cache", 0)
            locked = stat.get("total_unevictable", 0)
        else:
            shmem = stat.get("shmem", 0)
            anon, cache = stat.get("anon", 0), stat.get("file", 0)
            locked = stat.get("unevictable", 0)
        return HostMemory(
            anon=anon, file=max(0, cache - shmem), shmem=shmem, locked=locked, source="cgroup"
        )

    def oom_kills(self) -> int:
        """Return how many processes of the cgroup and those below it the kernel has killed for memory; 0 where it does not say.

        Version 2 counts those below by itself, version 1 does not.
        """
        if self.version == 2:
            return _oom_kills_in(self.folder / "memory.events")
        return sum(_oom_kills_in(path) for path in self.folder.rglob("memory.oom_control"))


def find_job_cgroup(
    job_id: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> MemoryCgroup | None:
    """Return the cgroup that Slurm made for job `job_id` on this node, or None where memory is not kept by job.

    A step's own cgroup would leave the other steps out, and a cgroup shared with other work would count it in.
    """
    for folder, version in memory_cgroups(proc, cgroups):
        if folder.name == f"job_{job_id}" and (folder / "memory.stat").is_file():
            return MemoryCgroup(folder=folder, version=version)
    return None


def own_cgroup(
    job_id: str, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> MemoryCgroup | None:
    """Return the job's cgroup, or the one of this process where Slurm keeps none; None on a machine without any."""
    job = find_job_cgroup(job_id, proc, cgroups)
    if job is not None:
        return job
    for folder, version in memory_cgroups(proc, cgroups):
        if any((folder / name).is_file() for name in ("memory.events", "memory.oom_control")):
            return MemoryCgroup(folder=folder, version=version)
    return None


@dataclass(slots=True)
class OomWatch:
    """Notices that the kernel's memory killer has ended processes of this node's cgroup since `watch_oom_kills`."""

    cgroup: MemoryCgroup | None
    before: int

    def evidence(self) -> str | None:
        """Return the line that shows it, or None when there was no kill."""
        if self.cgroup is None:
            return None
        now = self.cgroup.oom_kills()
        if now <= self.before:
            return None
        return f"cgroup {self.cgroup.folder}: oom_kill rose from {self.before} to {now}"


def watch_oom_kills(job_id: str) -> OomWatch:
    """Return a watch that counts from now."""
    cgroup = own_cgroup(job_id)
    return OomWatch(cgroup=cgroup, before=0 if cgroup is None else cgroup.oom_kills())


@dataclass(slots=True)
class OwnProcesses:
    """The pids of this agent and of everything that descends from it.

    The agent adopts orphans, so descent holds for as long as a process lives; each pid is looked at once.
    """

    root_pid: int
    proc: Path = Path("/proc")
    _own: set[int] = field(default_factory=set)
    _foreign: set[int] = field(default_factory=set)

    def refresh(self) -> frozenset[int]:
        """Return the pids that live now."""
        with os.scandir(self.proc) as entries:
            present = {int(entry.name) for entry in entries if entry.name.isdigit()}
        self._own &= present
        self._foreign &= present
        self._own.add(self.root_pid)
        parents = {
            pid: _parent_of(self.proc, pid) for pid in sorted(present - self._own - self._foreign)
        }
        while True:
            found = {pid for pid, parent in parents.items() if parent in self._own}
            if not found:
                break
            self._own |= found
            parents = {pid: parent for pid, parent in parents.items() if pid not in found}
        self._foreign |= {pid for pid, parent in parents.items() if parent is not None}
        return frozenset(self._own)


def sum_processes(
    pids: Iterable[int], proc: Path = Path("/proc"), *, pins: bool = False
) -> HostMemory:
    """Return the memory of `pids` together.

    Private memory adds up. Of files and shared memory the largest process is taken: all map the same libraries and the same
    object store, and which pages they share only a walk over their page tables would tell, far too dear for every second.
    With `pins`, shared memory adds up too: CUDA's pinned memory is each process's own and is counted as shared by the kernel
    (docs/measurements/sampling.md). The store then counts once for each
    process that reads it.
    """
    anon = locked = file = shmem = 0
    for pid in pids:
        sizes = _status_of(proc, pid)
        if sizes is None:
            continue
        anon += sizes[0]
        file = max(file, sizes[1])
        shmem = shmem + sizes[2] if pins else max(shmem, sizes[2])
        locked += sizes[3] + sizes[4]
    return HostMemory(anon=anon, file=file, shmem=shmem, locked=locked, source="processes")


def _status_of(proc: Path, pid: int) -> tuple[int, ...] | None:
    """Return the bytes that `_STATUS_KEYS` name; None for a process that has ended."""
    data = _bytes_of(f"{proc}/{pid}/status")
    if data is None:
        return None
    sizes = []
    for key in _STATUS_KEYS:
        start = data.find(b"\n" + key)
        sizes.append(
            0 if start < 0 else int(data[start + 1 + len(key) :].split(maxsplit=1)[0]) * 1024
        )
    return tuple(sizes)


def _oom_kills_in(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(value)
        for name, _, value in (line.partition(" ") for line in lines)
        if name == "oom_kill" and value.isdecimal()
    )


def _parent_of(proc: Path, pid: int) -> int | None:
    data = _bytes_of(f"{proc}/{pid}/stat")
    # The command, in parentheses, may hold blanks and parentheses itself.
    return None if data is None else int(data.rpartition(b")")[2].split()[1])


def _bytes_of(path: str) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, 8192) or None
    except OSError:
        return None
    finally:
        os.close(descriptor)
