"""The host target keeps one arena, loses nothing and refuses what the node's memory cannot hold."""

import os
import subprocess
import sys

import pytest
import torch

from miles_hpc.trainer import pinned
from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.disk_offload import as_bytes
from miles_hpc.trainer.host_arena import HostArena

CPU = torch.device("cpu")


def some_tensors() -> list[torch.Tensor]:
    base = torch.arange(10007, dtype=torch.float64)
    return [base, base[3::7], torch.empty(0), torch.tensor(True), torch.ones(5, 3).bfloat16().t()]


def test_bytes_survive_and_the_arena_is_kept_between_moves():
    arena, tensors = HostArena(device=CPU), some_tensors()
    before = [as_bytes(tensor.untyped_storage()).clone() for tensor in tensors]
    held = set()
    for _ in range(3):
        moved = arena.offload(tensors)
        assert moved.num_bytes == 10007 * 8 + 1 + 30
        assert all(tensor.untyped_storage().size() == 0 for tensor in tensors)
        arena.onload()
        held.add(arena.held_bytes)
        after = [as_bytes(tensor.untyped_storage()) for tensor in tensors]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert len(held) == 1
    arena.offload([torch.ones(100_000)])
    assert arena.held_bytes >= 400_000
    arena.close()
    assert arena.held_bytes == 0


def test_more_than_the_node_has_is_refused_with_nothing_freed(monkeypatch):
    monkeypatch.setattr(pinned, "available_bytes", lambda: 1000)
    arena, tensor = HostArena(device=CPU), torch.ones(100_000)
    with pytest.raises(DiskOffloadError, match=r"found 1000 B .*expected .*\(401408 bytes\)"):
        arena.offload([tensor])
    assert tensor.sum() == 100_000
    assert not arena.is_out


def test_wrong_order_is_refused():
    arena = HostArena(device=CPU)
    with pytest.raises(DiskOffloadError, match="nothing is out"):
        arena.onload()
    arena.offload([torch.ones(2)])
    with pytest.raises(DiskOffloadError, match="already out"):
        arena.offload([torch.ones(2)])


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/sys/fs/cgroup", os.W_OK),
    reason="makes a memory cgroup: needs root",
)
def test_available_memory_is_what_the_cgroup_leaves(tmp_path):
    from pathlib import Path

    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"miles-hpc-arena-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not (group / limit).exists():
                continue
            (group / limit).write_text(str(1 << 30))
            program = (
                f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid()))\n"
                "from miles_hpc.trainer.pinned import available_bytes\nprint(available_bytes())"
            )
            done = subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            assert 0 < int(done.stdout) <= 1 << 30
            return
        finally:
            group.rmdir()
    pytest.fail("no memory cgroup of version 1 or 2 could be made, though this is root")
