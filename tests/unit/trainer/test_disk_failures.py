"""A disk that fails, fails the step with path, numbers and advice; memory keeps every byte until the disk has it.

The faults are real: file systems that are full, broken, cut, removed or forbidden. Those that need a mount run as root only.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from miles_hpc.trainer.disk_file import DiskFile, DiskOffloadError
from miles_hpc.trainer.disk_offload import DiskOffload

MIB = 1 << 20
needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("mkfs.ext4") is None
    or not Path("/dev/loop-control").exists(),
    reason="mounts file systems of its own: needs root, mkfs.ext4 and loop devices",
)


def command(*argv: object) -> None:
    subprocess.run([str(word) for word in argv], check=True, capture_output=True, timeout=60)


@contextlib.contextmanager
def mounted(folder: Path, *options: object):
    folder.mkdir()
    command("mount", *options, folder)
    try:
        yield folder
    finally:
        command("umount", "--lazy", folder)


@contextlib.contextmanager
def ext4(tmp_path: Path, image: Path, size_mib: int):
    """An ext4 file system in `image`, on a loop device."""
    with image.open("wb") as file:
        file.truncate(size_mib * MIB)
    command("mkfs.ext4", "-q", "-m", "0", image)
    with mounted(tmp_path / "disk", "-o", "loop", image) as folder:
        yield folder


def make(folder: Path, **options: object) -> DiskOffload:
    return DiskOffload(
        folder / "tensors.bin", device=torch.device("cpu"), chunk_bytes=MIB, **options
    )


def tensors_of(num_mib: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_mib)
    return [
        torch.randint(0, 256, (MIB,), dtype=torch.uint8, generator=generator)
        for _ in range(num_mib)
    ]


def check_nothing_lost(tensors: list[torch.Tensor]) -> None:
    for tensor, expected in zip(tensors, tensors_of(len(tensors)), strict=True):
        assert torch.equal(tensor, expected)


@needs_mounts
def test_direct_io_is_used_on_ext4(tmp_path):
    with ext4(tmp_path, tmp_path / "image", 32) as folder:
        offload = make(folder)
        assert offload.offload(tensors_of(4)).direct
        offload.close()


@needs_mounts
def test_a_full_disk_names_path_and_numbers_and_frees_nothing(tmp_path):
    with ext4(tmp_path, tmp_path / "image", 16) as folder:
        offload, tensors = make(folder), tensors_of(24)
        with pytest.raises(DiskOffloadError) as caught:
            offload.offload(tensors)
        check_nothing_lost(tensors)
        message = str(caught.value)
        assert str(offload.path) in message
        assert "No space left on device" in message
        assert "24.0 MiB (25165824 bytes)" in message
        assert "MiB free" in message
        assert "offload.scratch_root" in message
        # What fits still goes out and comes back.
        few = tensors_of(3)
        offload.offload(few)
        offload.onload()
        check_nothing_lost(few)
        offload.close()
        assert list(folder.iterdir()) == [folder / "lost+found"]


@needs_mounts
def test_a_full_memory_file_system_without_reservation_fails_the_same_way(tmp_path):
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=4m", "none") as folder:
        offload, tensors = make(folder), tensors_of(8)
        with pytest.raises(DiskOffloadError, match="No space left on device"):
            offload.offload(tensors)
        check_nothing_lost(tensors)
        offload.close()


@needs_mounts
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_disk_that_breaks_while_writing_frees_nothing(tmp_path, mode):
    # The image believes in 64 MiB but its store ends after 12: writes beyond fail at the device, as a dying disk's do.
    with (
        mounted(tmp_path / "store", "-t", "tmpfs", "-o", "size=12m", "none") as store,
        ext4(tmp_path, store / "image", 64) as folder,
    ):
        offload, tensors = make(folder, mode=mode), tensors_of(24)
        with pytest.raises(DiskOffloadError) as caught:
            offload.offload(tensors)
        check_nothing_lost(tensors)
        assert str(offload.path) in str(caught.value)
        assert "writing at byte" in str(caught.value)
        assert "the device under the file system ran out" in str(caught.value)
        assert not offload.is_out
        offload.close()


@needs_mounts
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_disk_that_breaks_while_reading_is_told(tmp_path, mode):
    image = tmp_path / "image"
    with ext4(tmp_path, image, 64) as folder:
        offload, tensors = make(folder, mode=mode), tensors_of(24)
        offload.offload(tensors)
        os.truncate(image, 8 * MIB)
        with pytest.raises(
            DiskOffloadError, match=r"reading at byte \d+ failed: Input/output error"
        ):
            offload.onload()
        assert offload.is_out
        offload.close()


def test_a_removed_file_is_missed_before_memory_is_taken(tmp_path):
    offload, tensors = make(tmp_path), tensors_of(3)
    offload.offload(tensors)
    offload.path.unlink()
    with pytest.raises(DiskOffloadError, match=r"finding the file again failed.*clean-up scripts"):
        offload.onload()
    assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
    with pytest.raises(DiskOffloadError):
        make(tmp_path / "gone")


def test_a_removed_file_fails_the_next_offload_with_nothing_freed(tmp_path):
    offload, tensors = make(tmp_path), tensors_of(3)
    offload.path.unlink()
    with pytest.raises(DiskOffloadError, match="finding the file again failed"):
        offload.offload(tensors)
    check_nothing_lost(tensors)
    (tmp_path / "tensors.bin").write_bytes(b"someone else's")
    with pytest.raises(DiskOffloadError, match="another file stands at this path"):
        offload.offload(tensors)
    offload.close()
    assert (tmp_path / "tensors.bin").read_bytes() == b"someone else's"


def test_a_cut_file_is_told_with_both_lengths(tmp_path):
    offload, tensors = make(tmp_path), tensors_of(3)
    offload.offload(tensors)
    os.truncate(offload.path, MIB)
    with pytest.raises(DiskOffloadError, match=f"found {MIB} bytes, expected {3 * MIB}"):
        offload.onload()
    offload.close()


def test_changed_bytes_are_found_by_the_checksum_and_the_onload_can_be_repeated(tmp_path):
    offload, tensors = make(tmp_path, checksums=True), tensors_of(5)
    offload.offload(tensors)
    with offload.path.open("r+b") as file:
        file.seek(2 * MIB + 17)
        good = file.read(1)
        file.seek(2 * MIB + 17)
        file.write(bytes([good[0] ^ 4]))
    with pytest.raises(DiskOffloadError, match=r"have CRC-32 \w+, expected \w+"):
        offload.onload()
    with offload.path.open("r+b") as file:
        file.seek(2 * MIB + 17)
        file.write(good)
    offload.onload()
    check_nothing_lost(tensors)
    offload.close()


def test_a_file_size_limit_stops_the_reservation(tmp_path):
    result = in_child(
        tmp_path,
        f"""
        resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * MIB}, {2 * MIB}))
        offload, tensors = make(folder), tensors_of(4)
        try:
            offload.offload(tensors)
        except DiskOffloadError as error:
            print(error)
        check_nothing_lost(tensors)
        """,
    )
    assert "File too large" in result
    assert "file size limit 2.0 MiB" in result
    assert "ulimit -f" in result


def test_a_write_cut_short_half_way_through_a_block_fails_the_step(tmp_path):
    # The limit falls after the reservation and inside a block: the kernel writes the first part and says so.
    limit = MIB + 64 * 1024 + 4096
    result = in_child(
        tmp_path,
        f"""
        offload, tensors = make(folder, requests_in_flight=1), tensors_of(4)
        offload.offload(tensors)
        offload.onload()
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        try:
            offload.offload(tensors)
        except DiskOffloadError as error:
            print(error)
        check_nothing_lost(tensors)
        """,
    )
    assert "writing at byte 0 failed" in result
    assert "File too large" in result


@needs_mounts
def test_a_folder_without_permission_is_told(tmp_path):
    folder = Path("/var/tmp") / f"miles-hpc-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        result = in_child(
            folder,
            f"""
            os.setuid({pwd.getpwnam("nobody").pw_uid})
            try:
                make(folder)
            except DiskOffloadError as error:
                print(error)
            """,
        )
    finally:
        shutil.rmtree(folder)
    assert "creating the file failed: Permission denied" in result
    assert "Make the folder writable" in result


@needs_mounts
def test_a_disk_that_turned_read_only_is_told(tmp_path):
    with ext4(tmp_path, tmp_path / "image", 16) as folder:
        command("mount", "-o", "remount,ro", folder)
        with pytest.raises(DiskOffloadError, match=r"Read-only file system.*exclude the node"):
            make(folder)


def test_a_file_of_someone_else_at_the_path_is_not_overwritten(tmp_path):
    (tmp_path / "tensors.bin").write_bytes(b"precious")
    with pytest.raises(DiskOffloadError, match="File exists"):
        DiskFile(tmp_path / "tensors.bin")
    assert (tmp_path / "tensors.bin").read_bytes() == b"precious"


def in_child(folder: Path, body: str) -> str:
    """Run `body` in a process of its own, with this module's names and `folder`; return what it printed."""
    program = (
        f"import os, resource, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\nfrom test_disk_failures import *\n"
        f"folder = Path({str(folder)!r})\n" + textwrap.dedent(body)
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
