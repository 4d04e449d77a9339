"""Host memory from recorded trees: cgroup v1, v2 and both, and the sum over a job's own processes."""

import os
import signal
import subprocess
import sys

import pytest

from miles_hpc.node.host_memory import (
    MemoryCgroup,
    OomWatch,
    OwnProcesses,
    find_job_cgroup,
    own_cgroup,
    sum_processes,
)

pytestmark = pytest.mark.timeout(30)

# In the form of the kernel's cgroup v1 documentation; the per-group figures before the totals are those of an empty parent.
V1_STAT = """\
cache 0
rss 0
shmem 0
mapped_file 0
total_cache 9056256
total_rss 51904512
total_rss_huge 0
total_shmem 1351680
total_mapped_file 4730880
total_unevictable 12288
"""
# The same figures in the words of cgroup v2, where `file` holds the shared memory too.
V2_STAT = """\
anon 51904512
file 9056256
kernel 2097152
sock 0
shmem 1351680
file_mapped 4730880
inactive_anon 1
unevictable 12288
"""
V1_JOB = "slurm/uid_1000/job_7"
V2_JOB = "system.slice/slurmstepd.scope/job_7"


def write_tree(root, membership: str, files: dict[str, str]):
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(membership)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


@pytest.mark.parametrize(
    ("membership", "files", "version"),
    [
        (
            f"4:memory:/{V1_JOB}/step_0/task_0\n1:cpu:/x\n0::/\n",
            {f"memory/{V1_JOB}/memory.stat": V1_STAT},
            1,
        ),
        (
            f"0::/{V2_JOB}/step_0/user/task_0\n",
            {"cgroup.controllers": "memory", f"{V2_JOB}/memory.stat": V2_STAT},
            2,
        ),
        (f"0::/{V2_JOB}/step_0\n", {f"unified/{V2_JOB}/memory.stat": V2_STAT}, 2),
    ],
)
def test_the_whole_jobs_cgroup_is_read_with_shared_memory_apart(
    tmp_path, membership, files, version
):
    cgroup = find_job_cgroup("7", *write_tree(tmp_path, membership, files))
    assert cgroup is not None
    assert cgroup.version == version
    assert cgroup.folder.name == "job_7"
    host = cgroup.read()
    assert (host.anon, host.file, host.shmem, host.locked) == (51904512, 7704576, 1351680, 12288)
    assert host.total == 51904512 + 9056256
    assert host.committed == 51904512 + 1351680
    assert host.source == "cgroup"


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        # A cgroup that is not this job's would count other work.
        ("4:memory:/slurm/uid_1000/job_70/step_0\n", {"memory/slurm/memory.stat": V1_STAT}),
        ("0::/user.slice\n", {"cgroup.controllers": "", "user.slice/memory.stat": V2_STAT}),
        # Slurm keeps a cgroup for the job, but not of memory.
        (f"0::/{V2_JOB}/step_0\n", {"cgroup.controllers": "cpu", f"{V2_JOB}/cpu.stat": ""}),
        ("", {}),
    ],
)
def test_without_a_memory_cgroup_of_the_jobs_own_there_is_none(tmp_path, membership, files):
    assert find_job_cgroup("7", *write_tree(tmp_path, membership, files)) is None


def test_a_cgroup_that_is_gone_says_so(tmp_path):
    with pytest.raises(OSError, match=r"memory\.stat"):
        MemoryCgroup(folder=tmp_path, version=2).read()


def write_process(proc, pid: int, parent: int, **sizes_kib: int) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
    lines = "".join(f"{name}:\t{size:>8} kB\n" for name, size in sizes_kib.items())
    (folder / "status").write_text(f"Name:\tRssAnon: 5\n{lines}Threads:\t1\n")


def test_descendants_are_found_also_when_they_come_and_go(tmp_path):
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1), (21, 20)):
        write_process(tmp_path, pid, parent)
    (tmp_path / "meminfo").write_text("")
    processes = OwnProcesses(10, tmp_path)
    assert processes.refresh() == {10, 11, 12}
    # A child that started another one ended; the agent, a subreaper, adopted what it left.
    (tmp_path / "11" / "stat").unlink()
    (tmp_path / "11" / "status").unlink()
    (tmp_path / "11").rmdir()
    write_process(tmp_path, 9, 12)
    write_process(tmp_path, 8, 9)
    write_process(tmp_path, 22, 21)
    assert processes.refresh() == {8, 9, 10, 12}


def test_private_memory_adds_up_and_shared_pages_count_once(tmp_path):
    write_process(tmp_path, 10, 1, RssAnon=100, RssFile=50, RssShmem=7, VmLck=3, VmPin=2)
    write_process(tmp_path, 11, 10, RssAnon=300, RssFile=80, RssShmem=5, VmLck=0, VmPin=0)
    write_process(tmp_path, 12, 10)  # a kernel thread or a zombie has no such lines
    host = sum_processes((10, 11, 12, 13), tmp_path)
    kib = (host.anon // 1024, host.file // 1024, host.shmem // 1024, host.locked // 1024)
    assert kib == (400, 80, 7, 5)
    assert host.source == "processes"


def test_pinned_memory_of_each_process_adds_up(tmp_path):
    write_process(tmp_path, 10, 1, RssAnon=1, RssFile=1, RssShmem=700)
    write_process(tmp_path, 11, 10, RssAnon=1, RssFile=1, RssShmem=500)
    assert sum_processes((10, 11), tmp_path, pins=True).shmem == 1200 * 1024
    assert sum_processes((10, 11), tmp_path).shmem == 700 * 1024


def test_this_process_is_measured():
    before = sum_processes((os.getpid(),))
    held = b"x" * (32 << 20)
    after = sum_processes((os.getpid(),))
    assert after.anon - before.anon > len(held) // 2


def test_kills_for_memory_are_counted_below_the_jobs_cgroup(tmp_path):
    _, cgroups = write_tree(
        tmp_path,
        "",
        {
            "v2/memory.events": "low 0\nmax 7\noom 2\noom_kill 3\noom_group_kill 0\n",
            "v1/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
            "v1/step_0/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
        },
    )
    assert MemoryCgroup(folder=cgroups / "v2", version=2).oom_kills() == 3
    assert MemoryCgroup(folder=cgroups / "v1", version=1).oom_kills() == 3
    watch = OomWatch(MemoryCgroup(folder=cgroups / "v2", version=2), before=3)
    assert watch.evidence() is None
    (cgroups / "v2" / "memory.events").write_text("oom_kill 4\n")
    assert watch.evidence() == f"cgroup {cgroups / 'v2'}: oom_kill rose from 3 to 4"


def test_a_machine_whose_kernel_counts_no_kills_tells_of_none(tmp_path):
    assert own_cgroup("7", *write_tree(tmp_path, "0::/\n", {"cgroup.controllers": ""})) is None
    assert OomWatch(None, before=0).evidence() is None
    assert MemoryCgroup(folder=tmp_path / "gone", version=2).oom_kills() == 0


def test_a_real_kill_for_memory_is_noticed(small_cgroup):
    watch = OomWatch(small_cgroup, before=small_cgroup.oom_kills())
    enter = f"open({str(small_cgroup.folder / 'cgroup.procs')!r}, 'w').write('0')"
    hog = f"{enter}\nx = bytearray(256 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    done = subprocess.run([sys.executable, "-c", hog], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert watch.evidence() == f"cgroup {small_cgroup.folder}: oom_kill rose from 0 to 1"
