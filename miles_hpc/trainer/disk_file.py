"""One preallocated file: aligned blocks written and read whole, without leaving them in the page cache.

Direct I/O where the file system really does it (decided by a trial on the file itself), otherwise write-behind per block,
fdatasync at the end and POSIX_FADV_DONTNEED. Every failure becomes a `DiskOffloadError` with the path, the numbers and
what to do. Knows nothing of tensors or devices; safe to use from several threads.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import threading
import zlib
from pathlib import Path
from typing import Literal

from miles_hpc.errors import DriverError
from miles_hpc.filesystem import resident_bytes
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES, round_up
from miles_hpc.units import format_bytes

IoMode = Literal["auto", "direct", "buffered"]

_libc = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_ALL = 7  # WAIT_BEFORE | WRITE | WAIT_AFTER, linux/fs.h
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

_WRITING = "writing at byte"
_ADVICE = {
    errno.ENOSPC: "Free space there, lower what is offloaded, or set offload.scratch_root to a larger disk",
    errno.EDQUOT: "Your disk quota there is used up: free some, or set offload.scratch_root to another disk",
    errno.EFBIG: "Raise the file size limit (`ulimit -f unlimited`), or use a file system with larger files",
    errno.EIO: "The disk failed: see the kernel log of this node, exclude the node and requeue the job",
    errno.EACCES: "Make the folder writable for this user, or set offload.scratch_root to one that is",
    errno.EPERM: "Make the folder writable for this user, or set offload.scratch_root to one that is",
    errno.EROFS: "The file system is mounted read-only (often after a disk error): exclude the node",
    errno.ENOENT: "Something removed it while the job ran: keep clean-up scripts away from a live job's scratch",
    errno.ESTALE: "Something removed it while the job ran: keep clean-up scripts away from a live job's scratch",
    errno.ENOTEMPTY: "A live process has it: give each rank its own number, or wait until that process has ended",
    errno.EEXIST: "A live process has it: give each rank its own number, or wait until that process has ended",
    errno.ENOMEM: "Lower offload.chunk, or ask for more memory on the node",
}


class DiskOffloadError(DriverError):
    """Offloaded bytes could not be written or read back; nothing was freed before its bytes were safe."""


def disk_error(path: Path, action: str, error: OSError, wanted_bytes: int) -> DiskOffloadError:
    """Return the error a user sees for `error`, with free space and limits of the place it happened at."""
    free = "free space unknown"
    with contextlib.suppress(OSError):
        stat = os.statvfs(path if path.exists() else path.parent)
        free = f"{format_bytes(stat.f_bavail * stat.f_frsize)} free"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY:
        free += f", file size limit {format_bytes(limit)}"
    reason = error.strerror or str(error)
    advice = _ADVICE.get(error.errno or 0, "See the kernel log of this node")
    if error.errno == errno.ENOSPC and action.startswith(_WRITING):
        advice = "The space was reserved, so the device under the file system ran out (a thin volume?): exclude the node"
    return DiskOffloadError(
        f"{path}: {action} failed: {reason}; expected room and access for "
        f"{format_bytes(wanted_bytes)} ({wanted_bytes} bytes), found {free}. {advice}."
    )


class DiskFile:
    """A file of this process that holds blocks at aligned offsets.

    Args:
        path: file to make; its folder must exist and the file must not.
        mode: "auto" tries direct I/O and falls back; "direct" insists on it; "buffered" never uses it.
        checksums: keep a CRC-32 of every block in memory when written and check it when read.
    """

    def __init__(self, path: Path, *, mode: IoMode = "auto", checksums: bool = False) -> None:
        self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, "creating the file")
        self._checksums = dict[int, int]() if checksums else None
        if mode != "buffered":
            try:
                self._try_direct(insist=mode == "direct")
            except DiskOffloadError:
                self.close()
                raise

    @classmethod
    def of_existing(cls, path: Path) -> "DiskFile":
        """Open a file for reading alone, without direct I/O: it may be anywhere, such as in a checkpoint."""
        file = cls.__new__(cls)
        file._open(path, os.O_RDONLY, "opening the file")
        file.num_bytes = file._stat.st_size
        return file

    _checksums: dict[int, int] | None = None

    def _open(self, path: Path, flags: int, action: str) -> None:
        self.path = path
        self.num_bytes = 0
        self.direct = False
        self._lock = threading.Lock()
        try:
            self._fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(path, action, error, 0) from error
        self._stat = os.fstat(self._fd)

    def _try_direct(self, *, insist: bool) -> None:
        """Write and read one aligned block directly; some file systems accept the flag and fail only then."""
        trial = mmap.mmap(-1, ALIGNMENT_BYTES)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if insist or error.errno != errno.EINVAL:
                raise disk_error(self.path, "opening for direct I/O", error, 0) from error
            return
        try:
            os.pwritev(fd, [trial], 0)
            os.preadv(fd, [trial], 0)
        except OSError as error:
            os.close(fd)
            if insist or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise disk_error(self.path, "a direct write", error, ALIGNMENT_BYTES) from error
            return
        if not insist and resident_bytes(self.path):
            # The flag was taken but the page went through the cache (ZFS, journalled data, compression).
            os.close(fd)
            return
        os.close(self._fd)
        self._fd, self.direct = fd, True

    def preallocate(self, num_bytes: int) -> None:
        """Give the file exactly `num_bytes` (rounded up to the alignment) of reserved space.

        Raises:
            DiskOffloadError: if the space is not there; the file keeps its former size and content.
        """
        wanted = round_up(num_bytes)
        self.check_present()
        if wanted > self.num_bytes:
            self._reserve(wanted)
        elif wanted < self.num_bytes:
            os.ftruncate(self._fd, wanted)
        self.num_bytes = wanted

    def _reserve(self, wanted: int) -> None:
        # Not os.posix_fallocate: where the file system cannot reserve, glibc writes into every block instead.
        old = self.num_bytes
        result = _libc.fallocate(
            self._fd, 0, ctypes.c_longlong(old), ctypes.c_longlong(wanted - old)
        )
        if result == 0:
            return
        code = ctypes.get_errno()
        try:
            os.ftruncate(self._fd, old)
            if code not in _NO_FALLOCATE:
                raise OSError(code, os.strerror(code))
            stat = os.fstatvfs(self._fd)
            # ramfs and some network file systems count no blocks at all: nothing is known there, not nothing free.
            if stat.f_blocks and stat.f_bavail * stat.f_frsize < wanted - old:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(self._fd, wanted)
        except OSError as error:
            raise disk_error(self.path, "reserving space", error, wanted) from error

    def check_present(self) -> None:
        """Raise if the path no longer names this file or the file is shorter than what was written to it."""
        try:
            found = self.path.stat()
            if not os.path.samestat(found, self._stat):
                raise FileNotFoundError(errno.ENOENT, "another file stands at this path")
        except OSError as error:
            raise disk_error(self.path, "finding the file again", error, self.num_bytes) from error
        if found.st_size < self.num_bytes:
            raise DiskOffloadError(
                f"{self.path}: found {found.st_size} bytes, expected {self.num_bytes}. Something cut the file while "
                "the job ran: keep clean-up scripts away from a live job's scratch."
            )

    def write_block(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` (aligned in address and length) at `offset`; it is on the device or queued for it."""
        done = 0
        try:
            while done < len(buffer):
                count = os.pwritev(self._fd, [buffer[done:]], offset + done)
                # A short direct write may stop inside a block; the rest must start aligned again.
                step = count - count % ALIGNMENT_BYTES if count < len(buffer) - done else count
                if step <= 0:
                    raise OSError(
                        errno.ENOSPC, f"short write: {done + count} of {len(buffer)} bytes"
                    )
                done += step
            if not self.direct:
                self._flush_range(offset, len(buffer))
        except OSError as error:
            raise disk_error(self.path, f"{_WRITING} {offset}", error, self.num_bytes) from (error)
        if self._checksums is not None:
            checksum = zlib.crc32(buffer)
            with self._lock:
                self._checksums[offset] = checksum

    def _flush_range(self, offset: int, length: int) -> None:
        result = _libc.sync_file_range(
            self._fd, ctypes.c_longlong(offset), ctypes.c_longlong(length), _SYNC_FILE_RANGE_ALL
        )
        if result:
            code = ctypes.get_errno()
            if code not in (errno.ENOSYS, errno.ESPIPE, errno.EINVAL):
                raise OSError(code, os.strerror(code))
            os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, offset, length, os.POSIX_FADV_DONTNEED)

    def read_block(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` (aligned in address and length) from `offset`.

        Raises:
            DiskOffloadError: also when the file ends early or a checksum differs.
        """
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                step = count - count % ALIGNMENT_BYTES if count < len(buffer) - done else count
                if step <= 0:
                    raise OSError(
                        errno.EIO, f"the file ends: {done + count} of {len(buffer)} bytes"
                    )
                done += step
            if not self.direct:
                os.posix_fadvise(self._fd, offset, len(buffer), os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise disk_error(self.path, f"reading at byte {offset}", error, self.num_bytes) from (
                error
            )
        if self._checksums is not None:
            self._verify(buffer, offset)

    def _verify(self, buffer: memoryview, offset: int) -> None:
        assert self._checksums is not None
        with self._lock:
            expected = self._checksums.get(offset)
        found = zlib.crc32(buffer)
        if expected is not None and found != expected:
            raise DiskOffloadError(
                f"{self.path}: {len(buffer)} bytes at byte {offset} have CRC-32 {found:08x}, expected {expected:08x} "
                "as written. The disk or something on this node changed them: exclude the node and requeue the job."
            )

    def finish_writes(self) -> None:
        """Return once every block written is on the device; drop what is left of the file in the page cache."""
        try:
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise disk_error(self.path, "flushing", error, self.num_bytes) from error

    def finish_reads(self) -> None:
        """Drop what read-ahead left in the page cache."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, *, keep: bool = False) -> None:
        """Remove the file, unless it is to be kept, and let go of it; a second call does nothing."""
        if self._fd < 0:
            return
        if not keep:
            with contextlib.suppress(OSError):
                if os.path.samestat(self.path.stat(), self._stat):
                    self.path.unlink()
        os.close(self._fd)
        self._fd = -1
