"""What a path really is, from fixed mount tables; backing, on this machine's own disks."""

import textwrap
from pathlib import Path

import pytest

from miles_hpc.filesystem import (
    can_leave_memory,
    describe_path,
    mount_of,
    parse_mountinfo,
)

TABLE = textwrap.dedent(
    r"""
    22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
    30 22 0:25 / /dev/shm rw,nosuid - tmpfs tmpfs rw,size=24684084k
    31 22 0:40 / /lustre rw shared:7 master:2 - lustre 10.0.0.1@o2ib:/scratch rw
    32 22 0:41 / /with\040blank rw - xfs /dev/nvme0n1 rw
    33 22 252:0 / /zram rw - ext4 /dev/zram0 rw
    34 22 0:50 / /over rw - overlay overlay rw,lowerdir=/lower,upperdir=/dev/shm,workdir=/dev/shm/w
    35 22 0:51 / /hidden rw - overlay overlay rw,lowerdir=/lower,upperdir=/not/visible/here,workdir=/w
    36 22 0:52 / /late rw - tmpfs tmpfs rw
    37 36 0:53 / /late rw - ext4 /dev/vdb rw
    """
).strip()


@pytest.mark.parametrize(
    ("path", "backing"),
    [
        ("/somewhere/deep", "disk"),
        ("/dev/shm/x", "memory"),
        ("/dev/shmx", "disk"),
        ("/lustre/me", "network"),
        ("/with blank/x", "disk"),
        ("/zram/x", "memory"),
        ("/over/x", "memory"),
        ("/hidden/x", "unknown"),
        ("/late/x", "disk"),
    ],
)
def test_backing_follows_the_mount_that_holds_the_path(path, backing):
    assert describe_path(Path(path), parse_mountinfo(TABLE)).backing == backing


def test_a_link_does_not_hide_a_memory_file_system(tmp_path):
    (tmp_path / "nvme").symlink_to("/dev/shm")
    facts = describe_path(tmp_path / "nvme" / "job", parse_mountinfo(TABLE))
    assert facts.resolved == Path("/dev/shm/job")
    assert facts.backing == "memory"
    assert "tmpfs" in facts.why


def test_a_line_that_is_no_mount_is_left_out():
    assert parse_mountinfo("nonsense\n22 1 254:0 / / rw - ext4\n") == ()
    assert mount_of(Path("/x"), ()).fs_type == "unknown"


def test_only_a_memory_file_system_keeps_what_is_dropped(tmp_path):
    if describe_path(tmp_path).backing == "disk":
        assert can_leave_memory(tmp_path)
    assert not can_leave_memory(Path("/dev/shm"))
    assert list(tmp_path.iterdir()) == []
