"""The memory a job may use, from fixed trees of cgroup v1, v2 and both."""

import pytest

from miles_hpc.node.memory import memory_limit_bytes

GIB = 1 << 30


def write_tree(root, cgroup: str, files: dict[str, str]) -> tuple:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n")
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
