"""Who owns a rank's folder is what the kernel's lock says; only what is provably ours and dead is removed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_hpc.trainer.disk_file import DiskOffloadError
from miles_hpc.trainer.rank_dir import RankDir, collect_dead, rank_dir_from_environ

CHILD = """
import sys
from pathlib import Path
from miles_hpc.trainer.rank_dir import RankDir
kept = RankDir(Path(sys.argv[1]), attempt=int(sys.argv[2]), rank=int(sys.argv[3]))
(kept.path / "tensors.bin").write_bytes(b"x" * 100)
print(kept.path, flush=True)
{then}
"""


def start(
    scratch: Path, attempt: int, rank: int, then: str = "sys.stdin.read()"
) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(then=then), str(scratch), str(attempt), str(rank)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == str(
        scratch / "offload" / f"attempt-{attempt}" / f"rank-{rank}"
    )
    return child


@pytest.mark.parametrize("then", ["pass", "sys.exit(3)", "raise RuntimeError('boom')"])
def test_an_ending_process_takes_its_folder_along(tmp_path, then):
    child = start(tmp_path, 1, 0, then)
    child.communicate(timeout=60)
    assert not (tmp_path / "offload").exists()


def test_a_killed_process_is_collected_and_a_live_one_is_not(tmp_path):
    dead, live = start(tmp_path, 1, 0), start(tmp_path, 1, 1)
    try:
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait(timeout=60)
        assert (tmp_path / "offload/attempt-1/rank-0/tensors.bin").exists()
        fresh = RankDir(tmp_path, attempt=2, rank=0)
        assert not (tmp_path / "offload/attempt-1/rank-0").exists()
        assert (tmp_path / "offload/attempt-1/rank-1/tensors.bin").exists()
        fresh.close()
        with pytest.raises(
            DiskOffloadError, match=r"rank-1: making .* failed.*A live process has it"
        ):
            RankDir(tmp_path, attempt=1, rank=1)
    finally:
        for child in (dead, live):
            child.kill()
            child.communicate()
    assert [folder.name for folder in collect_dead(tmp_path)] == ["rank-1"]


def test_the_same_rank_starts_again_after_a_kill(tmp_path):
    child = start(tmp_path, 1, 0)
    child.kill()
    child.communicate()
    again = RankDir(tmp_path, attempt=1, rank=0)
    assert [entry.name for entry in again.path.iterdir()] == ["miles-hpc-rank.lock"]
    again.close()


def test_what_is_not_provably_ours_stays(tmp_path):
    root = tmp_path / "offload" / "attempt-1"
    (root / "rank-0").mkdir(parents=True)
    (root / "rank-0" / "data").write_bytes(b"no lock file")
    (root / "rank-1").mkdir()
    (root / "rank-1" / "miles-hpc-rank.lock").write_bytes(b"another program's lock")
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "miles-hpc-rank.lock").write_bytes(
        b"miles-hpc rank folder; locked while its process lives\n"
    )
    (root / "rank-2").symlink_to(other)
    assert collect_dead(tmp_path) == ()
    assert (root / "rank-0" / "data").exists()
    assert (root / "rank-1" / "miles-hpc-rank.lock").exists()
    assert (other / "miles-hpc-rank.lock").exists()


def test_a_forked_child_does_not_remove_its_parents_folder(tmp_path):
    child = start(
        tmp_path,
        1,
        0,
        "import os\nif os.fork() == 0: sys.exit(0)\nos.wait()\nprint(kept.path.exists())",
    )
    out, _ = child.communicate(timeout=60)
    assert out.strip() == "True"


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_in_memory_is_refused_by_its_resolved_path(tmp_path, link):
    shm = Path("/dev/shm") / f"miles-hpc-test-{os.getpid()}"
    shm.mkdir()
    try:
        scratch = shm
        if link:
            scratch = tmp_path / "innocent"
            scratch.symlink_to(shm)
        with pytest.raises(DiskOffloadError, match=f"{shm}.*tmpfs.*expected a disk of this node"):
            RankDir(scratch, attempt=1, rank=0)
        forced = RankDir(scratch, attempt=1, rank=0, allow_memory=True)
        forced.close()
    finally:
        (shm / "offload/attempt-1").rmdir() if (shm / "offload/attempt-1").exists() else None
        (shm / "offload").rmdir() if (shm / "offload").exists() else None
        shm.rmdir()


def test_the_environment_of_a_rank_names_its_folder(tmp_path):
    environ = {"MILES_HPC_SCRATCH": str(tmp_path), "MILES_HPC_ATTEMPT_DIR": "/runs/demo/attempts/3"}
    kept = rank_dir_from_environ(environ, 12, allow_memory=False)
    assert kept.path == tmp_path / "offload/attempt-3/rank-12"
    kept.close()
    with pytest.raises(DiskOffloadError, match="expected the job's scratch folder and attempts/N"):
        rank_dir_from_environ({}, 0, allow_memory=False)
