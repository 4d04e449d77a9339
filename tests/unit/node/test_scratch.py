"""Scratch and temp folders: which disk is taken, who may look in, and which leftovers go."""

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from miles_hpc.errors import PreflightError
from miles_hpc.filesystem import describe_path
from miles_hpc.handoff import ScratchRequest
from miles_hpc.node import scratch
from miles_hpc.node.survivors import TAG_VARIABLE


@pytest.fixture
def disk():
    """Return a folder on a disk whose path is short."""
    folder = Path(tempfile.mkdtemp(prefix="sc-", dir="/tmp"))
    if describe_path(folder).backing != "disk":
        pytest.skip("/tmp is not on a disk")
    yield folder
    shutil.rmtree(folder)


def request(root, *, min_free_bytes: int = 1, allow_memory: bool = False) -> ScratchRequest:
    return ScratchRequest(
        root=None if root is None else str(root),
        min_free_bytes=min_free_bytes,
        allow_memory=allow_memory,
    )


def test_memory_is_refused_and_taken_when_allowed():
    root, faults = scratch.choose_scratch_root(request("/dev/shm"), {}, "n1")
    assert root is None
    assert "tmpfs" in faults[0].found
    assert scratch.choose_scratch_root(request("/dev/shm", allow_memory=True), {}, "n1") == (
        Path("/dev/shm"), (),
    )  # fmt: skip


def test_a_disk_without_enough_space_is_refused_with_both_figures(disk):
    _, faults = scratch.choose_scratch_root(request(disk, min_free_bytes=1 << 60), {}, "n1")
    assert "free in" in faults[0].found
    assert "1048576.0 TiB free" in faults[0].expected


def test_a_missing_folder_is_refused(disk):
    _, faults = scratch.choose_scratch_root(request(disk / "none"), {}, "n1")
    assert "no folder" in faults[0].found


def test_without_a_root_the_sites_folder_comes_first_and_unfit_ones_are_passed_over(disk):
    environ = {"SLURM_TMPDIR": "/dev/shm", "TMPDIR": str(disk)}
    assert scratch.choose_scratch_root(request(None), environ, "n1") == (disk, ())
    root, faults = scratch.choose_scratch_root(request(None, min_free_bytes=1 << 60), environ, "n1")
    assert root is None
    assert "/dev/shm" in faults[0].found
    assert str(disk) in faults[0].found


def test_a_folder_is_private_and_goes_with_its_parent(disk):
    folder = scratch.make_scratch(disk, "7.0.1.n1")
    other = scratch.make_scratch(disk, "7.0.1.n2")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    (folder.path / "tensor").write_bytes(b"x")
    folder.remove()
    assert not folder.path.exists()
    assert other.path.exists()
    other.remove()
    assert list(disk.iterdir()) == []


def test_another_users_folder_or_a_link_is_not_used(disk):
    (disk / f"mhpc-{os.getuid()}").symlink_to("/tmp")
    with pytest.raises(PermissionError):
        scratch.make_scratch(disk, "7.0.1.n1")


def test_rays_folder_is_short_whatever_the_scratch_root_is(tmp_path):
    tag = "123456789.0.1." + "n" * 200
    folder = scratch.make_ray_temp(tmp_path, tag, "n1")
    try:
        assert len(str(folder.path)) <= scratch.RAY_TEMP_MAX_CHARS
    finally:
        folder.remove()


def test_no_short_folder_is_a_preflight_error(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_RAY_TEMP_ROOTS", ("/proc",))
    with pytest.raises(PreflightError, match="at most 45 characters"):
        scratch.make_ray_temp(tmp_path / ("long" * 20), "tag", "n1")


def leftover(disk: Path, tag: str) -> Path:
    """Make a folder as an agent that was killed would leave it."""
    folder = scratch.make_scratch(disk, tag)
    os.close(folder.lock_descriptor)
    return folder.path


def test_only_a_folder_of_a_provably_dead_job_is_collected(disk):
    dead = leftover(disk, "1.0.1.n1")
    held = scratch.make_scratch(disk, "2.0.1.n1")
    unmarked = dead.parent / "3.0.1.n1"
    unmarked.mkdir()
    garbled = leftover(disk, "4.0.1.n1")
    (garbled / ".owner").write_text("{")
    running = leftover(disk, "5.0.1.n1")
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={TAG_VARIABLE: "5.0.1.n1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        process.stdout.readline()
        removed = scratch.collect_leftovers(disk)
    finally:
        process.communicate(timeout=10)
    assert dead in removed
    assert not dead.exists()
    assert all(path.exists() for path in (held.path, unmarked, garbled, running))
    assert scratch.collect_leftovers(disk) == (running,)
    held.remove()


def test_the_lock_is_held_by_the_agent_alone(disk):
    folder = scratch.make_scratch(disk, "6.0.1.n1")
    with (folder.path / ".owner").open("r+b") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert json.loads(file.read()) == {"job_tag": "6.0.1.n1"}
    assert not os.get_inheritable(folder.lock_descriptor)
    folder.remove()
