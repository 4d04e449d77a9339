"""What a path really is, how much is free there, and how much of a file is in memory.

Reads `/proc/self/mountinfo` for the resolved path, so a symlink or a bind mount does not hide a memory file system.
Knows nothing of jobs. Standard library only, since the node agent and the trainer share it.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backing = Literal["disk", "memory", "network", "unknown"]

MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "rootfs", "devtmpfs", "hugetlbfs"})
# Types a cluster mounts from another machine; each FUSE type carries its own name after "fuse.".
NETWORK_TYPES = frozenset(
    [
        "nfs",
        "nfs4",
        "lustre",
        "gpfs",
        "mmfs",
        "beegfs",
        "ceph",
        "fuse.ceph",
        "fuse.ceph-fuse",
        "glusterfs",
        "fuse.glusterfs",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "pvfs2",
        "orangefs",
        "wekafs",
        "panfs",
        "fuse.sshfs",
        "fuse.juicefs",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.blobfuse",
        "fuse.dfuse",
    ]
)
_OVERLAY_TYPES = frozenset({"overlay", "overlayfs", "fuse.fuse-overlayfs"})
_MEMORY_DEVICES = ("/dev/zram", "/dev/ram")
_WINDOW_BYTES = 1 << 30
# mincore defines the lowest bit of each byte only.
_LOW_BIT = bytes(value & 1 for value in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    point: str
    fs_type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """What stands behind a path.

    Attributes:
        resolved: the path without symlinks; a part that does not exist yet is kept.
        mount: the mount that holds it.
        backing: where its bytes are kept; "unknown" for an overlay whose upper folder this process cannot see.
        why: the evidence for `backing`, for a message.
    """

    resolved: Path
    mount: Mount
    backing: Backing
    why: str


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """Return the mounts in the text of `/proc/PID/mountinfo`, oldest first.

    Source: proc(5), "/proc/pid/mountinfo"; optional fields end at a lone "-".
    """
    mounts = []
    for line in text.splitlines():
        fields = line.split(" ")
        if "-" not in fields[6:]:
            continue
        tail = fields[fields.index("-", 6) + 1 :]
        if len(tail) < 3:
            continue
        mounts.append(
            Mount(
                point=_unescape(fields[4]),
                fs_type=tail[0],
                source=_unescape(tail[1]),
                options=tuple(_unescape(option) for option in tail[2].split(",")),
            )
        )
    return tuple(mounts)


def read_mounts() -> tuple[Mount, ...]:
    """Return the mounts that this process sees."""
    return parse_mountinfo(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def mount_of(resolved: Path, mounts: Iterable[Mount]) -> Mount:
    """Return the mount that holds `resolved`: the longest mount point above it, the newest of equals."""
    best = Mount(point="/", fs_type="unknown", source="", options=())
    for mount in mounts:
        point = Path(mount.point)
        if (point == resolved or point in resolved.parents) and len(mount.point) >= len(best.point):
            best = mount
    return best


def describe_path(path: Path, mounts: tuple[Mount, ...] | None = None) -> PathFacts:
    """Return what stands behind `path`; `mounts` defaults to what this process sees."""
    mounts = read_mounts() if mounts is None else mounts
    resolved = Path(os.path.realpath(path))
    mount = mount_of(resolved, mounts)
    backing, why = _backing(mount, mounts)
    return PathFacts(resolved=resolved, mount=mount, backing=backing, why=why)


def _backing(mount: Mount, mounts: tuple[Mount, ...]) -> tuple[Backing, str]:
    here = f"{mount.fs_type} at {mount.point}"
    if mount.fs_type in MEMORY_TYPES:
        return "memory", here
    if mount.fs_type in NETWORK_TYPES:
        return "network", here
    if mount.source.startswith(_MEMORY_DEVICES):
        return "memory", f"{here} on {mount.source}, a disk in memory"
    if mount.fs_type not in _OVERLAY_TYPES:
        return ("unknown" if mount.fs_type == "unknown" else "disk"), here
    upper = next(
        (option.partition("=")[2] for option in mount.options if option.startswith("upperdir=")), ""
    )
    below = mount_of(Path(upper), mounts) if upper and Path(upper).is_dir() else mount
    if below.fs_type in _OVERLAY_TYPES or below.fs_type == "unknown":
        return "unknown", f"{here} whose upper folder {upper or '(none)'} is not visible here"
    backing, why = _backing(below, ())
    return backing, f"{here} whose upper folder {upper} is {why}"


def free_bytes(path: Path) -> int:
    """Return the bytes an ordinary user may still write below `path`."""
    facts = os.statvfs(path)
    return facts.f_bavail * facts.f_frsize


def can_leave_memory(folder: Path) -> bool:
    """Say whether what is written in `folder` can leave memory, by writing 1 MiB and dropping its page cache.

    A file of a memory file system stays resident whatever is advised; this settles an overlay whose upper folder is not
    visible.
    """
    probe = folder / f".miles-hpc-probe-{os.getpid()}"
    try:
        with probe.open("wb") as file:
            file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return resident_bytes(probe) < 1 << 20
    finally:
        probe.unlink(missing_ok=True)


def resident_bytes(path: Path) -> int:
    """Return how many bytes of `path` are in the page cache.

    The kernel tells the truth only about files that this user owns or may write; of others it says all are resident.

    Source: mincore(2).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return resident_bytes_of(descriptor)
    finally:
        os.close(descriptor)


def resident_bytes_of(descriptor: int) -> int:
    """Return how many bytes of an open file are in the page cache; see `resident_bytes`.

    Raises:
        OSError: if the file system cannot map files.
        ValueError: if the file shrinks meanwhile.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    size = os.fstat(descriptor).st_size
    pages = 0
    for start in range(0, size, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, size - start)
        # A private writable mapping, never written: ctypes takes addresses of writable buffers only.
        with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start) as window:
            vector = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
            anchor = ctypes.c_char.from_buffer(window)
            failed = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(length), vector
            )
            del anchor
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            pages += len(vector) - bytes(vector).translate(_LOW_BIT).count(0)
    return min(pages * mmap.PAGESIZE, size)


def _unescape(field: str) -> str:
    """Undo mountinfo's octal escapes of blank, tab, newline and backslash."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
