"""This job's folders on this node: scratch for offloaded tensors and a short temp folder for Ray's sockets.

Each folder belongs to one job, attempt and node, has mode 0700 and holds a lock that its agent keeps for life. A folder left
behind is collected only when that lock is free, it is this user's, and no process carries its job's tag. Knows nothing of
what is written there.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from miles_hpc.errors import Fault, PreflightError
from miles_hpc.filesystem import can_leave_memory, describe_path, free_bytes
from miles_hpc.handoff import ScratchRequest
from miles_hpc.node.survivors import owned_processes
from miles_hpc.units import format_bytes

_PREFIX = "mhpc-"
_LOCK = ".owner"
# A socket's path may have 107 bytes (unix(7)); Ray adds 62 below its temp folder.
RAY_TEMP_MAX_CHARS = 45
# Node-local disks by the names that clusters give them; TMPDIR comes first because a site's prolog sets it for the job.
_CANDIDATES = (
    "/local_scratch",
    "/localscratch",
    "/scratch/local",
    "/raid",
    "/mnt/nvme",
    "/nvme",
    "/local",
    "/var/tmp",
    "/tmp",
)
_CANDIDATE_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")
_RAY_TEMP_ROOTS = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(slots=True)
class JobFolder:
    """A private folder of this job on this node, held by a lock."""

    path: Path
    lock_descriptor: int

    def remove(self) -> None:
        """Remove the folder and what is in it, then let go of the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Only the last job's removal succeeds: a folder with another job's in it is not empty.
            self.path.parent.rmdir()
        if self.lock_descriptor >= 0:
            os.close(self.lock_descriptor)
            self.lock_descriptor = -1


def choose_scratch_root(
    request: ScratchRequest, environ: Mapping[str, str], node: str
) -> tuple[Path | None, tuple[Fault, ...]]:
    """Return the folder below which scratch goes, or the faults that leave none.

    With a root in the request that one must be fit; without, the first candidate that is fit is taken.
    """
    if request.root is not None:
        faults = judge_scratch_root(Path(request.root), request, node)
        return (None, faults) if faults else (Path(request.root), ())
    refused: list[str] = []
    named = [environ[name] for name in _CANDIDATE_VARIABLES if environ.get(name)]
    for candidate in (*named, *_CANDIDATES):
        if not Path(candidate).is_dir():
            continue
        faults = judge_scratch_root(Path(candidate), request, node)
        if not faults:
            return Path(candidate), ()
        refused.append(f"{candidate} ({faults[0].found})")
    return None, (
        Fault(
            where=f"{node}: scratch",
            found="; ".join(refused) or "no candidate folder",
            expected=_wanted(request),
            fix="Set the scratch root in the spec or the site profile to a node-local disk.",
        ),
    )


def judge_scratch_root(root: Path, request: ScratchRequest, node: str) -> tuple[Fault, ...]:
    """Return why `root` cannot hold scratch; nothing means that it can."""

    def fault(found: str, fix: str) -> tuple[Fault, ...]:
        return (Fault(where=f"{node}: scratch", found=found, expected=_wanted(request), fix=fix),)

    if not root.is_dir():
        return fault(f"no folder {root}", "Name a folder that exists on every node.")
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=f".{_PREFIX}probe-"):
            pass
    except OSError as error:
        return fault(f"{root}: {error.strerror}", "Name a folder that this user may write.")
    facts = describe_path(root)
    backing = facts.backing
    if backing == "unknown" and not request.allow_memory:
        backing = "disk" if can_leave_memory(root) else "memory"
    if backing != "disk" and not request.allow_memory:
        found = f"{facts.resolved} on {facts.why}, which is {backing}"
        return fault(found, "Name a node-local disk, or allow memory in [offload] of the spec.")
    free = free_bytes(root)
    if free < request.min_free_bytes:
        found = f"{format_bytes(free)} free in {facts.resolved}"
        return fault(found, "Free space there, or name another disk.")
    return ()


def _wanted(request: ScratchRequest) -> str:
    kind = "a writable folder" if request.allow_memory else "a writable folder on a node-local disk"
    return f"{kind} with {format_bytes(request.min_free_bytes)} free"


def make_scratch(root: Path, job_tag: str) -> JobFolder:
    """Make this job's folder below `root`; raises OSError."""
    return _make(root / f"{_PREFIX}{os.getuid()}" / job_tag, job_tag)


def make_ray_temp(scratch_root: Path, job_tag: str, node: str) -> JobFolder:
    """Make Ray's temp folder, short enough for its sockets whatever TMPDIR and the scratch root are.

    Raises:
        PreflightError: if no short folder can be written.
    """
    # The tag can be long; its digest is as unique and always short.
    digest = hashlib.sha256(job_tag.encode()).hexdigest()[:10]
    tried: list[str] = []
    for root in (*_RAY_TEMP_ROOTS, str(scratch_root)):
        path = Path(root) / f"{_PREFIX}{os.getuid()}" / digest
        if len(str(path)) > RAY_TEMP_MAX_CHARS:
            tried.append(f"{root}: {len(str(path))} characters")
            continue
        try:
            return _make(path, job_tag)
        except OSError as error:
            tried.append(f"{root}: {error}")
    fault = Fault(
        where=f"{node}: Ray's temp folder",
        found="; ".join(tried),
        expected=f"a writable folder with a path of at most {RAY_TEMP_MAX_CHARS} characters",
        fix="Make /tmp writable on the node.",
    )
    raise PreflightError(str(fault))


def _make(path: Path, job_tag: str) -> JobFolder:
    parent = path.parent
    while True:
        parent.mkdir(mode=0o700, exist_ok=True)
        status = parent.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
            raise PermissionError(f"{parent} belongs to another user")
        # Ray opens its own folder to everybody; this one keeps them out.
        parent.chmod(0o700)
        try:
            path.mkdir(mode=0o700)
            break
        except FileNotFoundError:
            # Another job of this user has just removed the parent with its last folder.
            continue
    owner = path / _LOCK
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, json.dumps({"job_tag": job_tag}).encode())
    return JobFolder(path=path, lock_descriptor=descriptor)


def collect_leftovers(scratch_root: Path) -> tuple[Path, ...]:
    """Remove this user's folders of jobs that are provably dead; return what was removed."""
    removed = []
    parents = {
        Path(root) / f"{_PREFIX}{os.getuid()}" for root in (*_RAY_TEMP_ROOTS, str(scratch_root))
    }
    for parent in sorted(parents):
        if not parent.is_dir() or parent.is_symlink() or parent.stat().st_uid != os.getuid():
            continue
        for folder in sorted(parent.iterdir()):
            if _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return tuple(removed)


def _is_dead(folder: Path) -> bool:
    """Say whether the agent that made `folder` and every process of its job on this host are gone.

    A lock works across process namespaces of one host; without a lock file nothing is proven and the folder stays.
    """
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tag = json.loads(os.read(descriptor, 4096))["job_tag"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    finally:
        os.close(descriptor)
    return isinstance(tag, str) and not owned_processes(tag, descendants=False)
