"""Offloaded bytes go to a disk of this node and nowhere else, whatever the path looks like, unless forced."""

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
import torch

from miles_hpc import filesystem
from miles_hpc.filesystem import parse_mountinfo
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.disk_offload import DiskOffload
from miles_hpc.trainer.rank_dir import RankDir

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: needs root")


@contextlib.contextmanager
def mounted(folder: Path, *options: object):
    folder.mkdir(parents=True, exist_ok=True)
    words = ["mount", *map(str, options), str(folder)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=60)


@contextlib.contextmanager
def overlay(upper: Path, folder: Path):
    for name in ("upper", "work", "lower"):
        (upper / name).mkdir()
    options = f"lowerdir={upper / 'lower'},upperdir={upper / 'upper'},workdir={upper / 'work'}"
    with mounted(folder, "-t", "overlay", "-o", options, "overlay") as merged:
        yield merged


def check_refused_unless_forced(scratch: Path, why: str) -> None:
    with pytest.raises(DiskOffloadError, match=rf"(?s){why}.*expected a disk of this node"):
        RankDir(scratch, attempt=1, rank=0)
    forced = RankDir(scratch, attempt=1, rank=0, allow_memory=True)
    offload, tensor = make(forced.path), torch.arange(100_000)
    offload.offload([tensor])
    offload.onload()
    assert torch.equal(tensor, torch.arange(100_000))
    offload.close()
    forced.close()


def make(folder: Path) -> DiskOffload:
    return DiskOffload(folder / "f", device=torch.device("cpu"), chunk_bytes=1 << 20)


@needs_root
@pytest.mark.parametrize("fs_type", ["tmpfs", "ramfs"])
def test_a_memory_file_system_is_refused(tmp_path, fs_type):
    with mounted(tmp_path / "nvme", "-t", fs_type, "none") as scratch:
        check_refused_unless_forced(scratch, rf"{fs_type} at .*\(memory\)")


@needs_root
def test_an_overlay_whose_upper_folder_is_in_memory_is_refused(tmp_path):
    with (
        mounted(tmp_path / "memory", "-t", "tmpfs", "none") as memory,
        overlay(memory, tmp_path / "scratch") as scratch,
    ):
        check_refused_unless_forced(scratch, r"overlay at .* is tmpfs at .*\(memory\)")


@needs_root
def test_an_overlay_on_a_disk_is_taken(tmp_path):
    if filesystem.describe_path(tmp_path).backing != "disk":
        pytest.skip("the temporary folder is not on a disk")
    (tmp_path / "disk").mkdir()
    with overlay(tmp_path / "disk", tmp_path / "scratch") as scratch:
        kept = RankDir(scratch, attempt=1, rank=0)
        offload, tensor = make(kept.path), torch.arange(1_000_000)
        offload.offload([tensor])
        assert filesystem.resident_bytes(offload.path) == 0
        offload.onload()
        assert torch.equal(tensor, torch.arange(1_000_000))
        offload.close()
        kept.close()


@pytest.mark.parametrize("fs_type", ["nfs4", "lustre", "gpfs", "beegfs", "fuse.juicefs"])
def test_a_network_file_system_is_refused(tmp_path, monkeypatch, fs_type):
    table = f"22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 0:9 / {tmp_path} rw - {fs_type} srv:/x rw"
    monkeypatch.setattr(filesystem, "read_mounts", lambda: parse_mountinfo(table))
    check_refused_unless_forced(tmp_path, rf"{fs_type} at .*\(network\)")
