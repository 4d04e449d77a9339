"""The folder of one rank on a node's scratch disk: made, held and removed by the process that uses it.

`<scratch>/offload/attempt-N/rank-R`, or `rank-R-PURPOSE` for a second one of the same rank, where scratch is already the job's own. A lock file inside is held (flock) for as
long as the process lives, so the kernel itself says who is dead, also after SIGKILL and across containers; pids are never
consulted. Knows nothing of what is kept in the folder.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

from miles_hpc.filesystem import can_leave_memory, describe_path
from miles_hpc.trainer.disk_file import DiskOffloadError, disk_error

_LOCK_NAME = "miles-hpc-rank.lock"
_LOCK_TEXT = b"miles-hpc rank folder; locked while its process lives\n"


class RankDir:
    """A folder that only this process uses; removed by `close`, at exit, or by a later rank once we are dead.

    Args:
        scratch: the job's folder on a disk of this node.
        attempt: attempt of the run, from 1.
        rank: global rank.
        allow_memory: accept a memory or network file system.
        purpose: tells this folder from another one of the same rank.

    Raises:
        DiskOffloadError: if the folder cannot be made, is another live process's, or is not on a local disk.
    """

    def __init__(
        self,
        scratch: Path,
        *,
        attempt: int,
        rank: int,
        allow_memory: bool = False,
        purpose: str = "",
    ) -> None:
        name = f"rank-{rank}-{purpose}" if purpose else f"rank-{rank}"
        self.path = scratch / "offload" / f"attempt-{attempt}" / name
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not allow_memory:
                require_local_disk(self.path.parent)
            collect_dead(scratch)
            lock_fd = _take(self.path)
        except OSError as error:
            raise disk_error(self.path, "making the rank's folder", error, 0) from error
        self._remove = weakref.finalize(self, _remove, self.path, lock_fd, os.getpid())

    def close(self) -> None:
        """Remove the folder with all that is in it; a second call does nothing."""
        self._remove()


def rank_dir_from_environ(
    environ: Mapping[str, str], rank: int, *, allow_memory: bool, purpose: str = ""
) -> RankDir:
    """Return the folder of `rank` below `MILES_HPC_SCRATCH`, scoped by the attempt that `MILES_HPC_ATTEMPT_DIR` names."""
    scratch = environ.get("MILES_HPC_SCRATCH", "")
    attempt = Path(environ.get("MILES_HPC_ATTEMPT_DIR", "")).name
    if not scratch or not attempt.isdigit():
        raise DiskOffloadError(
            f"rank {rank}: found MILES_HPC_SCRATCH={scratch!r} and an attempt named {attempt!r}; expected the job's "
            "scratch folder and attempts/N. Start the rank through the node agent, or offload to host memory."
        )
    return RankDir(
        Path(scratch),
        attempt=int(attempt),
        rank=rank,
        allow_memory=allow_memory,
        purpose=purpose,
    )


def require_local_disk(folder: Path) -> None:
    """Raise unless what is written in `folder`, by its resolved path, ends on a disk of this machine."""
    facts = describe_path(folder)
    backing = facts.backing
    if backing == "unknown":
        backing = "disk" if can_leave_memory(folder) else "memory"
    if backing != "disk":
        raise DiskOffloadError(
            f"{facts.resolved}: found {facts.why} ({backing}); expected a disk of this node. Set offload.scratch_root to "
            "one, or offload.allow_memory_scratch = true to keep the bytes there all the same."
        )


def collect_dead(scratch: Path) -> tuple[Path, ...]:
    """Remove rank folders below `scratch` whose process is gone, and return them.

    Only a folder that holds our lock file, belongs to this user and whose lock nobody holds is ours and dead.
    """
    removed = []
    for folder in sorted(scratch.glob("offload/attempt-*/*")):
        if folder.is_symlink() or not folder.is_dir():
            continue
        with contextlib.suppress(OSError), _lock_of_dead(folder):
            shutil.rmtree(folder)
            removed.append(folder)
    return tuple(removed)


@contextlib.contextmanager
def _lock_of_dead(folder: Path) -> Iterator[None]:
    """Hold the lock of a dead process's folder; raises OSError when it is alive, foreign or not ours."""
    fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or os.pread(fd, 128, 0) != _LOCK_TEXT:
            raise PermissionError("not a rank folder of this user")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another collector may have removed the folder, and a new rank taken its name, since the lock was opened. With the
        # lock of what stands there now in hand, nobody else removes it and no rename replaces it.
        if not os.path.samestat(os.fstat(fd), (folder / _LOCK_NAME).stat()):
            raise FileNotFoundError("collected by someone else")
        yield
    finally:
        os.close(fd)


def _take(path: Path) -> int:
    """Make `path` with a held lock inside, appearing under its name only when the lock is held; return the lock."""
    nursery = _make_nursery(path)
    fd = os.open(nursery / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, _LOCK_TEXT)
        nursery.rename(path)
    except OSError:
        shutil.rmtree(nursery, ignore_errors=True)
        os.close(fd)
        raise
    return fd


def _make_nursery(path: Path) -> Path:
    for _ in range(20):
        try:
            return Path(tempfile.mkdtemp(prefix=f"{path.name}.new-", dir=path.parent))
        except FileNotFoundError:  # the last rank of this attempt just removed the empty parent
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    raise FileNotFoundError(errno.ENOENT, "the folder is removed as often as it is made")


def _remove(path: Path, lock_fd: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a forked child must not remove its parent's folder
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)
    for parent in path.parents[:2]:
        with contextlib.suppress(OSError):  # not empty: other ranks are still there
            parent.rmdir()
