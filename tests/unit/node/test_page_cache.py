"""Checkpoint files leave memory, as mincore and the cgroup say; whatever else lies in the folders is left alone."""

import os
import pwd
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles_hpc.filesystem import describe_path, resident_bytes
from miles_hpc.node.page_cache import (
    PageCache,
    cgroup_file_bytes,
    drop_page_cache,
    regular_files,
)
from miles_hpc.run.events import read_events

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes owners or mounts: needs root")


@pytest.fixture
def disk(tmp_path):
    if describe_path(tmp_path).backing != "disk":
        pytest.skip("the temporary folder is not on a disk")
    return tmp_path


def write_clean(path: Path, num_bytes: int) -> Path:
    """Make a file that is on the disk and, having been read, in memory too."""
    with path.open("wb") as file:
        file.write(os.urandom(num_bytes))
        file.flush()
        os.fsync(file.fileno())
    path.read_bytes()
    return path


def test_a_checkpoint_leaves_memory_and_stays_on_the_disk(disk):
    path = write_clean(disk / "weights", 48 * MIB + 17)
    content = path.read_bytes()
    assert resident_bytes(path) == 48 * MIB + 17
    found = drop_page_cache([disk])
    assert (found.num_files, found.total_bytes) == (1, 48 * MIB + 17)
    assert found.resident_before_bytes == 48 * MIB + 17
    assert found.resident_after_bytes == resident_bytes(path) == 0
    assert (found.num_untold, found.num_unreadable) == (0, 0)
    assert path.read_bytes() == content


def test_many_files_in_many_folders_all_go(disk):
    total = 0
    for index in range(300):
        folder = disk / f"iter_{index % 7}" / f"rank_{index % 11}"
        folder.mkdir(parents=True, exist_ok=True)
        total += write_clean(folder / f"{index}.distcp", 4096 + 131 * index).stat().st_size
    found = drop_page_cache([disk])
    assert (found.num_files, found.total_bytes) == (300, total)
    assert 0 < found.resident_before_bytes <= total  # a machine short of memory drops some itself
    assert found.resident_after_bytes == 0
    again = drop_page_cache([disk], num_threads=1)
    assert (again.num_files, again.resident_before_bytes) == (300, 0)


def test_pipes_sockets_dangling_links_and_cycles_hold_nothing_up(disk):
    write_clean(disk / "weights", MIB)
    (disk / "empty").touch()
    os.mkfifo(disk / "pipe")
    (disk / "folder").mkdir()
    (disk / "folder" / "up").symlink_to(disk)
    (disk / "dangling").symlink_to(disk / "none")
    (disk / "itself").symlink_to(disk / "itself")
    (disk / "terminal").symlink_to("/dev/null")
    found = drop_page_cache([disk, disk / "missing", disk / "pipe"])
    assert (found.num_files, found.num_unreadable) == (2, 0)
    assert found.resident_after_bytes == 0


def test_links_of_a_hub_snapshot_and_linked_folders_are_followed_once(disk):
    (disk / "blobs").mkdir()
    blob = write_clean(disk / "blobs" / "5f3e", MIB)
    snapshot = disk / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/5f3e")
    (snapshot / "hard").hardlink_to(blob)
    elsewhere = disk / "elsewhere"
    elsewhere.mkdir()
    write_clean(elsewhere / "shard", MIB)
    (snapshot / "more").symlink_to(elsewhere)
    assert len(list(regular_files([snapshot, blob]))) == 2
    found = drop_page_cache([snapshot, disk / "blobs", blob])
    assert (found.num_files, found.total_bytes) == (2, 2 * MIB)
    assert resident_bytes(blob) == resident_bytes(elsewhere / "shard") == 0


def test_pages_that_cannot_go_are_told(disk):
    import mmap

    path = write_clean(disk / "mapped", MIB)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        touched = sum(mapped[at] for at in range(0, MIB, mmap.PAGESIZE))
        found = drop_page_cache([disk])
        assert touched > 0
        assert found.resident_after_bytes == MIB
    assert drop_page_cache([disk]).resident_after_bytes == 0


def test_files_that_vanish_meanwhile_are_no_fault(disk):
    folder = disk / "busy"
    folder.mkdir()
    done = threading.Event()

    def churn() -> None:
        index = 0
        while not done.is_set():
            paths = [folder / f"{index}-{part}" for part in range(20)]
            for path in paths:
                path.write_bytes(b"x" * 5000)
            for path in paths:
                path.unlink()
            index += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            assert drop_page_cache([disk]).num_unreadable == 0
    finally:
        done.set()
        thread.join()


@needs_root
def test_what_may_not_be_read_is_counted_and_what_others_own_is_dropped_untold():
    # Below /var/tmp, since the temporary folders of tests are closed to other users.
    folder = Path("/var/tmp") / f"miles-hpc-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        shared = write_clean(folder / "shared", MIB)
        shared.chmod(0o444)
        write_clean(folder / "secret", MIB).chmod(0o400)
        (folder / "closed").mkdir(mode=0o700)
        program = (
            "import os, pathlib\nfrom miles_hpc.node.page_cache import drop_page_cache\n"
            f"os.setgroups([]); os.setgid(65534); os.setuid({pwd.getpwnam('nobody').pw_uid})\n"
            f"found = drop_page_cache([pathlib.Path({str(folder)!r})])\n"
            "print(found.num_files, found.num_untold, found.num_unreadable, found.total_bytes, found.resident_before_bytes)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.split() == ["1", "1", "2", str(MIB), "0"], done.stderr
        assert resident_bytes(shared) == 0
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()


def test_nothing_in_the_folder_is_changed(disk):
    path = write_clean(disk / "weights", MIB)
    before = [entry.stat() for entry in (disk, path)]
    drop_page_cache([disk])
    after = [entry.stat() for entry in (disk, path)]
    assert [(s.st_mtime_ns, s.st_ctime_ns, s.st_size) for s in before] == [
        (s.st_mtime_ns, s.st_ctime_ns, s.st_size) for s in after
    ]


STEP = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
V2 = "anon 5\nfile 1000\nshmem 300\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (f"0::/{STEP}\n", {"cgroup.controllers": "memory", f"{STEP}/memory.stat": V2}, 700),
        (
            # The whole job, whichever step's task read the files.
            f"0::/{STEP}\n",
            {
                "cgroup.controllers": "memory",
                f"{STEP}/memory.stat": V2,
                "system.slice/slurmstepd.scope/job_7/memory.stat": "file 9000\nshmem 0\n",
            },
            9000,
        ),
        (
            "4:cpu:/x\n3:memory:/slurm/uid_1/job_7/step_0\n0::/\n",
            {
                "memory/slurm/uid_1/job_7/step_0/memory.stat": "cache 1\ntotal_cache 2\n",
                "memory/slurm/uid_1/job_7/memory.stat": "cache 9\ntotal_cache 50\ntotal_shmem 8\n",
            },
            42,
        ),
        ("0::/\n", {"cgroup.controllers": ""}, None),
    ],
)
def test_the_cgroups_page_cache_is_read_in_both_versions(tmp_path, cgroup, files, expected):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(text)
    found = cgroup_file_bytes(tmp_path / "proc", tmp_path / "cgroup")
    assert (found and found[0]) == expected


def wait_for_event(context, cache: PageCache) -> dict:
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        cache.drop_when_loaded()
        found = [e for e in read_events(context.events.path) if e["kind"] == "page_cache_dropped"]
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError("no page_cache_dropped event after 30 s")


def test_the_event_has_the_figures_before_and_after_and_comes_once(disk, make_context):
    (disk / "checkpoint").mkdir()
    path = write_clean(disk / "checkpoint" / "weights", 32 * MIB)
    context = make_context(page_cache_roots=(str(disk / "checkpoint"),))
    context.attempt.rendezvous.mkdir()
    cache = PageCache(context)
    cache.drop_when_loaded()
    assert resident_bytes(path) == 32 * MIB  # not loaded yet
    context.rendezvous.announce_loaded()
    event = wait_for_event(context, cache)
    assert (event["num_files"], event["total_bytes"]) == (1, 32 * MIB)
    assert (event["resident_before_bytes"], event["resident_after_bytes"]) == (32 * MIB, 0)
    assert (event["num_untold"], event["num_unreadable"]) == (0, 0)
    assert event["seconds"] >= 0
    if cgroup_file_bytes() is not None:
        assert event["cgroup"].endswith("memory.stat")
        assert event["cgroup_file_before_bytes"] >= 0
        assert event["cgroup_file_after_bytes"] >= 0
    path.read_bytes()
    for _ in range(3):
        cache.drop_when_loaded()
    assert resident_bytes(path) == 32 * MIB
    assert sum(1 for _ in read_events(context.events.path)) == 1


def test_what_earlier_attempts_saved_is_dropped_too_and_nothing_where_none_is_asked_for(
    disk, make_context
):
    saved = disk / "checkpoints" / "step-3"
    saved.mkdir(parents=True)
    path = write_clean(saved / "adapter.bin", MIB)
    for roots, left in (((), MIB), ((str(disk / "missing"),), 0)):
        context = make_context(page_cache_roots=roots)
        context.attempt.rendezvous.mkdir(exist_ok=True)
        context.rendezvous.announce_loaded()
        cache = PageCache(context)
        if roots:
            assert wait_for_event(context, cache)["total_bytes"] == MIB
        else:
            cache.drop_when_loaded()
            assert list(read_events(context.events.path)) == []
        assert resident_bytes(path) == left


def test_a_file_system_that_hangs_holds_up_neither_the_watch_nor_the_exit(tmp_path):
    # A FIFO that a walk meets as a root stands for an open that never returns.
    program = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from miles_hpc.node import page_cache
os.mkfifo({str(tmp_path / "pipe")!r})
page_cache._drop_file = lambda path: open({str(tmp_path / "pipe")!r})  # blocks for ever
(pathlib.Path({str(tmp_path)!r}) / "weights").write_bytes(b"x")
class Loaded:
    def is_loaded(self): return True
class Context:
    rendezvous = Loaded()
    class handoff: page_cache_roots = ({str(tmp_path)!r},)
    class run: checkpoints = pathlib.Path({str(tmp_path / "checkpoints")!r})
cache = page_cache.PageCache(Context())
for _ in range(3):
    cache.drop_when_loaded()
print("the watch goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the watch goes on\n"
