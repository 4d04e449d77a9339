"""The node agent's look at memory: every second, in a thread of its own, into samples-NODE.jsonl; and the memory alarm.

A library or file system that hangs holds up this thread alone. Each source is read every second, or as seldom as keeps it
within its share of 0.5 % of a core. Knows no phase: the report finds it by time.
"""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from miles_hpc.errors import NodeError
from miles_hpc.filesystem import free_bytes
from miles_hpc.node.context import NodeContext
from miles_hpc.node.gpu_memory import GpuReader, GpuUse, open_gpus
from miles_hpc.node.host_memory import MemoryCgroup, OwnProcesses, find_job_cgroup, sum_processes
from miles_hpc.node.memory_alarm import Alarm, AlarmJudge
from miles_hpc.node.page_cache import load_roots, measured_drop
from miles_hpc.node.teardown import NodeResources
from miles_hpc.run.events import Kind
from miles_hpc.run.samples import HostMemory, Sample, SampleLog
from miles_hpc.run.save_request import ask_to_save

INTERVAL_S = 1.0
HOST_SHARE, GPU_SHARE, SCRATCH_SHARE, NCCL_SHARE = 0.003, 0.0008, 0.0007, 0.0005
"""Parts of one core that each source may take, the watch over NCCL among them; together 0.5 %."""
_JOIN_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pace:
    """When a source may be read again: after a second, or later where its last reading was dear."""

    share: float
    due_s: float = 0.0
    cpu_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        """Say whether the source may be read now."""
        return now_s >= self.due_s

    def charge(self, now_s: float, cpu_s: float) -> None:
        """Note that a reading that began at `now_s` took `cpu_s` of processor time."""
        self.cpu_s += cpu_s
        # A little early, since the thread itself wakes once a second and never exactly.
        self.due_s = now_s + max(0.9 * INTERVAL_S, cpu_s / self.share)


@dataclass(slots=True)
class MemoryReader:
    """Reads host, GPU and scratch, each at its own pace; what is not due keeps its last figure."""

    cgroup: MemoryCgroup | None
    processes: OwnProcesses
    gpus: GpuReader | None
    resources: NodeResources
    host: HostMemory | None = None
    gpu: tuple[GpuUse, ...] = ()
    scratch: int | None = None
    scratch_free: int | None = None
    host_pace: Pace = field(default_factory=lambda: Pace(HOST_SHARE))
    gpu_pace: Pace = field(default_factory=lambda: Pace(GPU_SHARE))
    scratch_pace: Pace = field(default_factory=lambda: Pace(SCRATCH_SHARE))

    def read(self) -> Sample | None:
        """Return what is held now; None while the host's figures are not due or cannot be had."""
        now_s = time.monotonic()
        if not self.host_pace.is_due(now_s):
            return None
        start_s = time.thread_time()
        self.host = self._read_host()
        self.host_pace.charge(now_s, time.thread_time() - start_s)
        if self.gpus is not None and self.gpu_pace.is_due(now_s):
            start_s = time.thread_time()
            self.gpu = self.gpus.read(self.processes.refresh())
            self.gpu_pace.charge(now_s, time.thread_time() - start_s)
        if self.scratch_pace.is_due(now_s):
            start_s = time.thread_time()
            self._read_scratch()
            self.scratch_pace.charge(now_s, time.thread_time() - start_s)
        if self.host is None:
            return None
        return Sample(
            time_s=time.time(),
            host=self.host,
            gpu=tuple(use.job_bytes for use in self.gpu),
            gpu_processes=tuple(
                (u.index, pid, size) for u in self.gpu for pid, size in u.processes
            ),
            scratch=self.scratch,
            scratch_free=self.scratch_free,
        )

    def _read_host(self) -> HostMemory | None:
        if self.cgroup is None:
            pids = self.processes.refresh()
            return sum_processes(pids, self.processes.proc, pins=self.gpus is not None)
        try:
            host = self.cgroup.read()
        except OSError:
            return None
        if self.gpus is None:
            return host
        return add_pinned(
            host, sum_processes(self.processes.refresh(), self.processes.proc, pins=True)
        )

    def _read_scratch(self) -> None:
        folder = self.resources.scratch
        if folder is None:
            return
        try:
            self.scratch_free = free_bytes(folder.path)
            self.scratch = disk_bytes(folder.path)
        except OSError:
            self.scratch = self.scratch_free = None


def add_pinned(cgroup: HostMemory, processes: HostMemory) -> HostMemory:
    """Return the cgroup's figures with the pinned memory that CUDA's driver allocates, which no cgroup is charged for.

    The processes map it as shared memory; what they map beyond the cgroup's own shared memory is pinned.
    """
    pinned = max(0, processes.shmem - cgroup.shmem)
    return replace(cgroup, shmem=cgroup.shmem + pinned, locked=cgroup.locked + pinned)


def disk_bytes(folder: Path) -> int:
    """Return the bytes that the files below `folder` take on disk; what vanishes meanwhile is left out."""
    total, pending = 0, [str(folder)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
    return total


@dataclass(slots=True)
class Sampler:
    """Writes the samples of one node and acts on the alarm."""

    context: NodeContext
    reader: MemoryReader
    samples: SampleLog
    judge: AlarmJudge | None
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Sample until `stop`; what cannot be written is said once in the log and ends sampling, never the job."""
        begin_s = time.monotonic()
        try:
            while not self._end.is_set():
                self.look()
                self._end.wait(INTERVAL_S)
        except OSError as error:
            log.warning("memory is no longer sampled: %s", error)
        took_s, of_s = time.thread_time(), time.monotonic() - begin_s
        log.info("sampling memory took %.2f %% of a core over %.0f s", 100 * took_s / of_s, of_s)

    def look(self) -> None:
        """Take one sample, write it if it says something new, and act if it raises the alarm."""
        sample = self.reader.read()
        if sample is None:
            return
        alarm = None
        if self.judge is not None:
            alarm = self.judge.judge(sample.host, loaded=self.context.rendezvous.is_loaded())
        self.samples.append(sample, always=alarm is not None)
        if alarm is not None:
            self._act(alarm)

    def stop(self) -> None:
        """End the loop at its next look."""
        self._end.set()

    def _act(self, alarm: Alarm) -> None:
        request = self.context.handoff.memory_alarm
        action = "warn" if request is None else request.action
        log.warning("%s: %s", self.context.node, alarm)
        self.context.events.append(
            Kind.MEMORY_ALARM,
            host_bytes=alarm.counted,
            limit_bytes=alarm.limit,
            anon_bytes=alarm.host.anon,
            file_bytes=alarm.host.file,
            shmem_bytes=alarm.host.shmem,
            locked_bytes=alarm.host.locked,
            cause=alarm.cause,
            action=action,
            message=str(alarm),
        )
        if action == "drop_page_cache":
            self._drop()
        elif action == "stop":
            self._stop(f"{self.context.node}: {alarm}")

    def _stop(self, reason: str) -> None:
        """Have the driver save and stop; before the model is loaded, or where no request can be written, end at once."""
        if self.context.rendezvous.is_loaded():
            try:
                key = self.context.rendezvous.attempt_key
                ask_to_save(self.context.attempt, key, "memory_alarm", reason)
            except OSError as error:
                log.warning("no request to save could be written: %s", error)
            else:
                return
        self.context.stop.end_because(
            NodeError(
                f'{reason}. agent.on_memory_alarm = "stop" ended the job; it continues from its last complete checkpoint '
                "when it is started again. Find what grew with miles-hpc report."
            )
        )

    def _drop(self) -> None:
        found = measured_drop(load_roots(self.context))
        self.context.events.append(Kind.PAGE_CACHE_DROPPED, **found)


def make_sampler(context: NodeContext, resources: NodeResources) -> Sampler:
    """Return the sampler of this agent's node."""
    identity, handoff = context.identity, context.handoff
    reader = MemoryReader(
        cgroup=find_job_cgroup(identity.job_id) if identity.cluster == "slurm" else None,
        processes=OwnProcesses(os.getpid()),
        gpus=open_gpus() if handoff.gpus_per_node else None,
        resources=resources,
    )
    request = handoff.memory_alarm
    return Sampler(
        context=context,
        reader=reader,
        samples=SampleLog(context.attempt.node_samples(context.node)),
        judge=None if request is None else AlarmJudge(request.host_bytes),
    )


@contextmanager
def sampling(context: NodeContext, resources: NodeResources) -> Iterator[None]:
    """Sample in a thread until the block ends."""
    sampler = make_sampler(context, resources)
    thread = threading.Thread(target=sampler.run, name="sampling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sampler.stop()
        thread.join(_JOIN_S)
