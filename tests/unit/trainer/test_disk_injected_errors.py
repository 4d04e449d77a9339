"""Errors that no file system here can be made to give, put in between the offload and the kernel.

Quotas, a device that fails in the middle of a file or only at the flush, and requests cut short: the step fails with path,
numbers and advice, memory keeps every byte, and once the fault is gone the same offload succeeds.
"""

import ctypes
import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from miles_hpc.trainer import disk_file
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.disk_layout import ALIGNMENT_BYTES
from miles_hpc.trainer.disk_offload import DiskOffload

MIB = 1 << 20
SIZES = (3 * MIB + 1, 0, 5 * MIB - 4097, 7)
MODES = pytest.mark.parametrize("mode", ["auto", "buffered"])


def tensors_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES
    ]


def make(folder: Path, mode: str) -> DiskOffload:
    return DiskOffload(
        folder / "tensors.bin", device=torch.device("cpu"), chunk_bytes=MIB, mode=mode
    )


def check_nothing_lost(tensors: list[torch.Tensor]) -> None:
    for tensor, expected in zip(tensors, tensors_of(), strict=True):
        assert torch.equal(tensor, expected)


class Faulty:
    """A call of `os` that fails or falls short from its `after`-th use on; the others go to the kernel."""

    def __init__(self, real, fault, *, after: int = 0) -> None:
        self.real, self.fault, self.left = real, fault, after
        self.lock = threading.Lock()
        self.faults = 0

    def __call__(self, *arguments):
        with self.lock:
            self.left -= 1
            due = self.left < 0
            self.faults += due
        return self.fault(self.real, *arguments) if due else self.real(*arguments)


def failing(code: int):
    def fault(_real, *_arguments):
        raise OSError(code, os.strerror(code))

    return fault


def half(real, descriptor, buffers, offset):
    """Move the first half of the blocks and say so."""
    size = len(buffers[0])
    return real(descriptor, [buffers[0][: max(size // 2, ALIGNMENT_BYTES) & -4096]], offset)


def half_and_a_bit(real, descriptor, buffers, offset):
    """Stop inside a block, as a signal or a limit can make the kernel do."""
    count = half(real, descriptor, buffers, offset)
    return count + 100 if count + 100 < len(buffers[0]) else count


@MODES
@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.EDQUOT, "Your disk quota there is used up"),
        (errno.EIO, "The disk failed: see the kernel log"),
        (errno.ENOSPC, "the device under the file system ran out"),
        (errno.EROFS, "mounted read-only"),
        (errno.EPERM, "Make the folder writable"),
    ],
)
def test_a_failing_write_frees_nothing_and_can_be_repeated(
    tmp_path, monkeypatch, mode, after, code, said
):
    offload, tensors = make(tmp_path, mode), tensors_of()
    with monkeypatch.context() as patch:
        fault = Faulty(os.pwritev, failing(code), after=after)
        patch.setattr(os, "pwritev", fault)
        with pytest.raises(DiskOffloadError) as caught:
            offload.offload(tensors)
    message = str(caught.value)
    assert fault.faults
    assert f"{offload.path}: writing at byte " in message
    assert os.strerror(code) in message
    assert said in message
    assert "bytes), found " in message
    assert not offload.is_out
    check_nothing_lost(tensors)
    offload.offload(tensors)
    assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
    offload.onload()
    check_nothing_lost(tensors)
    offload.close()


class NoRoom:
    """A libc whose fallocate meets a limit."""

    def __init__(self, code: int) -> None:
        self.code = code

    def fallocate(self, *_arguments) -> int:
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_a_reservation_that_meets_a_quota_writes_nothing(tmp_path, monkeypatch, code):
    offload, tensors = make(tmp_path, "auto"), tensors_of()
    with monkeypatch.context() as patch:
        patch.setattr(disk_file, "_libc", NoRoom(code))
        with pytest.raises(DiskOffloadError, match="reserving space failed") as caught:
            offload.offload(tensors)
    assert os.strerror(code) in str(caught.value)
    wanted = -(-sum(SIZES) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    assert f"({wanted} bytes)" in str(caught.value)
    assert offload.path.stat().st_blocks * 512 <= ALIGNMENT_BYTES  # the trial of direct I/O alone
    check_nothing_lost(tensors)
    offload.offload(tensors)
    offload.onload()
    check_nothing_lost(tensors)
    offload.close()


@MODES
def test_bytes_that_fail_only_at_the_flush_are_not_freed(tmp_path, monkeypatch, mode):
    offload, tensors = make(tmp_path, mode), tensors_of()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", Faulty(os.fdatasync, failing(errno.EIO)))
        with pytest.raises(DiskOffloadError, match=r"flushing failed: Input/output error"):
            offload.offload(tensors)
    assert not offload.is_out
    check_nothing_lost(tensors)
    offload.close()


@MODES
def test_a_file_that_vanishes_while_it_is_written_frees_nothing(tmp_path, monkeypatch, mode):
    offload, tensors = make(tmp_path, mode), tensors_of()

    def unlink_then_write(real, *arguments):
        offload.path.unlink(missing_ok=True)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", Faulty(os.pwritev, unlink_then_write, after=3))
        with pytest.raises(DiskOffloadError, match=r"finding the file again failed.*clean-up"):
            offload.offload(tensors)
    assert not offload.is_out
    check_nothing_lost(tensors)
    offload.close()


@MODES
@pytest.mark.parametrize("short", [half, half_and_a_bit])
def test_requests_cut_short_are_continued(tmp_path, monkeypatch, mode, short):
    offload, tensors = make(tmp_path, mode), tensors_of()
    with monkeypatch.context() as patch:
        writes, reads = Faulty(os.pwritev, short), Faulty(os.preadv, short)
        patch.setattr(os, "pwritev", writes)
        patch.setattr(os, "preadv", reads)
        offload.offload(tensors)
        offload.onload()
        assert writes.faults > 8
        assert reads.faults > 8
    check_nothing_lost(tensors)
    offload.close()


@MODES
@pytest.mark.parametrize("moved", [0, 100])
def test_a_write_that_gets_nowhere_ends(tmp_path, monkeypatch, mode, moved):
    offload, tensors = make(tmp_path, mode), tensors_of()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", Faulty(os.pwritev, lambda *_: moved, after=2))
        with pytest.raises(DiskOffloadError, match=rf"short write: {moved} of \d+ bytes"):
            offload.offload(tensors)
    check_nothing_lost(tensors)
    offload.close()


@MODES
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_failing_read_can_be_repeated(tmp_path, monkeypatch, mode, code):
    offload, tensors = make(tmp_path, mode), tensors_of()
    offload.offload(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Faulty(os.preadv, failing(code), after=4))
        with pytest.raises(DiskOffloadError, match=r"reading at byte \d+ failed") as caught:
            offload.onload()
    assert os.strerror(code) in str(caught.value)
    assert offload.is_out
    offload.onload()
    check_nothing_lost(tensors)
    offload.close()


@MODES
def test_a_read_that_ends_early_is_told(tmp_path, monkeypatch, mode):
    offload, tensors = make(tmp_path, mode), tensors_of()
    offload.offload(tensors)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", Faulty(os.preadv, lambda *_: 0, after=1))
        with pytest.raises(DiskOffloadError, match=r"the file ends: 0 of \d+ bytes"):
            offload.onload()
    offload.onload()
    check_nothing_lost(tensors)
    offload.close()
