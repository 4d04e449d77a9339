"""The page cache that loading a checkpoint leaves on this node: dropped once, in the background, and measured.

Files are only opened for reading and advised about: nothing is written, flushed or locked, so a network file system and
other readers notice no more than opened files. Knows nothing of engines; the folders come with the handoff.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from miles_hpc.filesystem import resident_bytes_of
from miles_hpc.node.context import NodeContext
from miles_hpc.node.host_memory import MemoryCgroup
from miles_hpc.node.memory import memory_cgroups
from miles_hpc.run.events import Kind

_NUM_THREADS = 8
# The kernel passes over a page that it is just moving or reclaiming itself; the next time it can go.
_NUM_ADVICES = 3
# A small drop is over within that time and its event stands before the driver can end; a large one must not hold the watch.
_PATIENCE_S = 0.2
_VANISHED = (errno.ENOENT, errno.ESTALE, errno.ELOOP, errno.ENOTDIR)


@dataclass(slots=True, kw_only=True)
class CacheDrop:
    """What dropping the page cache of some files did.

    Attributes:
        num_files: files that were dropped.
        total_bytes: their sizes.
        resident_before_bytes / resident_after_bytes: bytes in memory, of the files that the kernel tells about.
        num_untold: files among them of which it does not: another user's, or on a file system that maps no files.
        num_unreadable: files and folders that could not be opened; what vanished meanwhile is not counted.
    """

    num_files: int = 0
    total_bytes: int = 0
    resident_before_bytes: int = 0
    resident_after_bytes: int = 0
    num_untold: int = 0
    num_unreadable: int = 0


class _Walk:
    """Each regular file at or below some roots once, also when links, hard links or cycles reach it twice."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.num_unreadable = 0
        self._waiting = [Path(root) for root in roots]
        self._seen: set[tuple[int, int]] = set()

    def __iter__(self) -> Iterator[Path]:
        while self._waiting:
            path = self._waiting.pop()
            try:
                found = path.stat()  # follows links: a file of a hub snapshot is one to a blob
                if (found.st_dev, found.st_ino) in self._seen:
                    continue
                self._seen.add((found.st_dev, found.st_ino))
                if stat.S_ISDIR(found.st_mode):
                    self._waiting += path.iterdir()
                elif stat.S_ISREG(found.st_mode):
                    yield path
            except OSError as error:
                self.num_unreadable += error.errno not in _VANISHED


def regular_files(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield each regular file at or below `roots` once; links are followed, what is missing is skipped."""
    yield from _Walk(roots)


def drop_page_cache(roots: Iterable[Path], *, num_threads: int = _NUM_THREADS) -> CacheDrop:
    """Advise the kernel that the files at or below `roots` are not needed in memory, and measure what that did.

    Only clean pages that no process maps can go; the others are in `resident_after_bytes`.
    """
    walk = _Walk(roots)
    paths, total, lock = iter(walk), CacheDrop(), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                path = next(paths, None)
            if path is None:
                return
            found = _drop_file(path)
            with lock:
                for name in CacheDrop.__slots__:
                    setattr(total, name, getattr(total, name) + getattr(found, name))

    # Not an executor: its threads would be waited for at exit, and an open on a dead server never returns.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total.num_unreadable += walk.num_unreadable
    return total


def _drop_file(path: Path) -> CacheDrop:
    try:
        # Without O_NONBLOCK, a pipe put in the file's place since it was seen would block for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return CacheDrop(num_unreadable=int(error.errno not in _VANISHED))
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return CacheDrop()
        told = _is_told(path, found)
        before = _resident(descriptor) if told else None
        after = before
        for _ in range(_NUM_ADVICES):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # 0, 0: all of the file
            after = _resident(descriptor) if told else None
            if not after:
                break
    except OSError as error:
        return CacheDrop(num_unreadable=int(error.errno not in _VANISHED))
    finally:
        os.close(descriptor)
    if before is None or after is None:
        return CacheDrop(num_files=1, total_bytes=found.st_size, num_untold=1)
    return CacheDrop(
        num_files=1,
        total_bytes=found.st_size,
        resident_before_bytes=before,
        resident_after_bytes=after,
    )


def _is_told(path: Path, found: os.stat_result) -> bool:
    """Say whether mincore tells the truth about a file: of others, it says that all pages are in memory.

    Source: mincore(2), "since Linux 5.2".
    """
    user = os.geteuid()
    return user in (0, found.st_uid) or os.access(path, os.W_OK, effective_ids=True)


def _resident(descriptor: int) -> int | None:
    try:
        return resident_bytes_of(descriptor)
    except (OSError, ValueError):
        return None


def cgroup_file_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> tuple[int, str] | None:
    """Return the page cache of files that is charged to this job on this node, and the file that says so.

    The job's cgroup where Slurm made one, else the innermost with a count. Memory file systems are left out: their pages
    are counted as page cache too, and cannot be dropped.
    """
    found = [
        MemoryCgroup(folder=folder, version=version)
        for folder, version in memory_cgroups(proc, cgroups)
        if (folder / "memory.stat").exists()
    ]
    # Stable: the innermost stays first among those that are no job's.
    found.sort(key=lambda cgroup: not cgroup.folder.name.startswith("job_"))
    for cgroup in found:
        with suppress(OSError):
            return cgroup.read().file, str(cgroup.folder / "memory.stat")
    return None


def measured_drop(roots: Iterable[Path]) -> dict[str, int | float | str | None]:
    """Drop the page cache of the files at or below `roots`; return the fields of the event that says so."""
    start_s, before = time.monotonic(), cgroup_file_bytes()
    found = drop_page_cache(roots)
    seconds, after = round(time.monotonic() - start_s, 3), cgroup_file_bytes()
    return {name: getattr(found, name) for name in CacheDrop.__slots__} | {
        "cgroup_file_before_bytes": None if before is None else before[0],
        "cgroup_file_after_bytes": None if after is None else after[0],
        "cgroup": None if after is None else after[1],
        "seconds": seconds,
    }


def load_roots(context: NodeContext) -> tuple[Path, ...]:
    """Return all that this attempt may have loaded: the handoff's folders, and what earlier attempts saved.

    Empty where the handoff has none: then nothing is to be dropped.
    """
    roots = tuple(Path(root) for root in context.handoff.page_cache_roots)
    return (*roots, context.run.checkpoints) if roots else ()


@dataclass(slots=True)
class PageCache:
    """Drops the page cache of the checkpoint files once, as soon as the driver has loaded them."""

    context: NodeContext
    _thread: threading.Thread | None = None
    _done: list[dict[str, int | float | str | None]] = field(default_factory=list)

    def drop_when_loaded(self) -> None:
        """Start the drop if the driver has loaded the model; a later call reports it once it is done.

        An empty list of roots drops nothing. A file system that hangs holds up a thread of this process, not the caller.
        """
        if self._thread is None:
            roots = load_roots(self.context)
            if not roots or not self.context.rendezvous.is_loaded():
                return
            self._thread = threading.Thread(target=self._drop, args=(roots,), daemon=True)
            self._thread.start()
            self._thread.join(_PATIENCE_S)
        if self._done:
            self.context.events.append(Kind.PAGE_CACHE_DROPPED, **self._done.pop())

    def _drop(self, roots: tuple[Path, ...]) -> None:
        self._done.append(measured_drop(roots))
