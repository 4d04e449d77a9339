"""The memory a job may use, from fixed trees of cgroup v1, v2 and both."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from miles_hpc.node.memory import memory_left_bytes, memory_limit_bytes

GIB = 1 << 30


def write_tree(root, cgroup: str, files: dict[str, str]) -> tuple:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(
        f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {48 * GIB // 1024} kB\n"
    )
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


STEP = "system.slice/slurmstepd.scope/job_7/step_0/user/task_0"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (f"0::/{STEP}\n", {"cgroup.controllers": "memory"}, 64 * GIB),
        (
            f"0::/{STEP}\n",
            {"cgroup.controllers": "memory", f"{STEP}/memory.max": "max\n"},
            64 * GIB,
        ),
        (
            # The limit stands at the job, above the step's own folder.
            f"0::/{STEP}\n",
            {
                "cgroup.controllers": "memory",
                f"{STEP}/memory.max": "max\n",
                "system.slice/slurmstepd.scope/job_7/memory.max": f"{8 * GIB}\n",
            },
            8 * GIB,
        ),
        (
            "5:memory:/slurm/uid_0/job_7/step_0\n4:cpu,cpuacct:/x\n0::/\n",
            {
                "memory/slurm/uid_0/job_7/step_0/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/slurm/uid_0/job_7/memory.limit_in_bytes": f"{3 * GIB}\n",
            },
            3 * GIB,
        ),
        (
            # Hybrid: v2 is mounted beside v1.
            f"0::/{STEP}\n",
            {f"unified/{STEP}/memory.max": f"{2 * GIB}\n"},
            2 * GIB,
        ),
        ("0::/\n", {"cgroup.controllers": "memory", "memory.max": f"{128 * GIB}\n"}, 64 * GIB),
    ],
)
def test_the_tightest_limit_wins(tmp_path, cgroup, files, expected):
    limit, where = memory_limit_bytes(*write_tree(tmp_path, cgroup, files))
    assert limit == expected
    assert where


def test_a_limit_names_the_file_it_was_read_from(tmp_path):
    tree = write_tree(tmp_path, "0::/a\n", {"cgroup.controllers": "", "a/memory.max": "4096\n"})
    assert memory_limit_bytes(*tree)[1].endswith("a/memory.max")


# The lines that count, of the form that a kernel 6.1 writes; a job that has read 5 GiB of checkpoint and holds 1 GiB in /dev/shm.
V2_STAT = f"""\
anon {GIB}
file {6 * GIB}
shmem {GIB}
inactive_anon {2 * GIB}
active_anon 4096
inactive_file {4 * GIB}
active_file {GIB}
unevictable 0
slab_reclaimable {GIB // 2}
slab_unreclaimable 4096
"""
V1_STAT = f"""\
cache 0
inactive_file 0
active_file 0
total_cache {6 * GIB}
total_rss {GIB}
total_shmem {GIB}
total_inactive_anon {2 * GIB}
total_inactive_file {4 * GIB}
total_active_file {GIB}
"""
V2_JOB = "system.slice/slurmstepd.scope/job_7"
V1_JOB = "memory/slurm/uid_0/job_7"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected", "where"),
    [
        ("0::/\n", {"cgroup.controllers": "memory"}, 48 * GIB, "MemAvailable"),
        (
            f"0::/{STEP}\n",
            {
                "cgroup.controllers": "memory",
                f"{STEP}/memory.max": "max\n",
                f"{STEP}/memory.current": "4096\n",
                f"{V2_JOB}/memory.max": f"{8 * GIB}\n",
                f"{V2_JOB}/memory.current": f"{15 * GIB // 2}\n",
                f"{V2_JOB}/memory.stat": V2_STAT,
            },
            6 * GIB,
            V2_JOB,
        ),
        (
            "5:memory:/slurm/uid_0/job_7/step_0\n0::/\n",
            {
                f"{V1_JOB}/step_0/memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1_JOB}/step_0/memory.usage_in_bytes": "4096\n",
                f"{V1_JOB}/memory.limit_in_bytes": f"{8 * GIB}\n",
                f"{V1_JOB}/memory.usage_in_bytes": f"{7 * GIB}\n",
                f"{V1_JOB}/memory.stat": V1_STAT,
            },
            6 * GIB,
            V1_JOB,
        ),
        (
            # A container's own group is nearly empty, the one above it, of another job too, nearly full.
            "0::/pod/c1\n",
            {
                "cgroup.controllers": "memory",
                "pod/c1/memory.max": f"{4 * GIB}\n",
                "pod/c1/memory.current": "0\n",
                "pod/memory.max": f"{9 * GIB}\n",
                "pod/memory.current": f"{8 * GIB}\n",
                "pod/memory.stat": "anon 1\n",
            },
            GIB,
            "pod",
        ),
        (
            "0::/a\n",
            {"cgroup.controllers": "", "a/memory.max": "4096\n", "a/memory.current": "8192\n"},
            0,
            "/a",
        ),
        (
            "0::/a\n",
            {"cgroup.controllers": "", "a/memory.max": "4096\n"},
            48 * GIB,
            "MemAvailable",
        ),
    ],
)
def test_what_is_left_is_the_limit_less_what_the_kernel_cannot_take_back(
    tmp_path, cgroup, files, expected, where
):
    left, said = memory_left_bytes(*write_tree(tmp_path, cgroup, files))
    assert left == expected
    assert where in said


def test_files_that_a_process_has_read_do_not_lessen_what_is_left_and_its_memory_does(
    small_cgroup, tmp_path
):
    source = textwrap.dedent(
        """
        import os, pathlib, sys
        from miles_hpc.node.memory import memory_left_bytes
        pathlib.Path(sys.argv[1]).write_text("0")
        big = pathlib.Path(sys.argv[2])
        before, where = memory_left_bytes()
        with big.open("wb") as file:
            for _ in range(24):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        cached = memory_left_bytes()[0]
        held = bytearray(b"x") * (24 << 20)
        print(before - cached, cached - memory_left_bytes()[0], where)
        """
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            source,
            str(small_cgroup.folder / "cgroup.procs"),
            str(tmp_path / "big"),
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    by_cache, by_memory, where = done.stdout.split()
    assert abs(int(by_cache)) < 8 << 20
    assert int(by_memory) > 16 << 20
    assert where == str(small_cgroup.folder)


def test_what_is_left_on_this_machine_is_less_than_its_limit():
    assert 0 < memory_left_bytes()[0] < memory_limit_bytes()[0]
