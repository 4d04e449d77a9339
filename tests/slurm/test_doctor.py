"""`miles-hpc doctor` on a real Slurm: one table of all nodes' faults, exit code 0 or 10, nothing left behind.

The rig's nodes share one host. One becomes different because `cluster.python` is a script that, on that node, gives the agent
a mount namespace or limits of its own before it starts the interpreter.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles_hpc.handoff import NcclPin, ScratchRequest, node_argv
from tests.fakes.nvml import build_library
from tests.slurm.jobs import (
    REPOSITORY,
    handoff_of,
    outputs,
    processes_of,
    submit,
    verdict_of,
    wait_for,
    write_run,
    write_variant,
)

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

NEVER = "raise SystemExit('this driver must not start')"
SHIFTED_CLOCK = r"""
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = syscall(SYS_clock_gettime, clock, now);
  const char *shift = getenv("SHIFT_S");
  if (code == 0 && clock == CLOCK_REALTIME && shift) now->tv_sec += atol(shift);
  return code;
}
"""
BASE = {
    "cluster.device": "cpu",
    "cluster.memory_per_node": "500MiB",
    "cluster.exclusive": False,
    "cluster.cpus_per_node": 1,
    "offload.scratch_min_free": "1MiB",
}


def doctor_argv(tmp_path, *arguments, nodes=4, **changes) -> list[str]:
    """Return the command with its run folders in `tmp_path`/runs."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    keys = {**BASE, "job.run_root": str(tmp_path / "runs"), **changes}
    overrides = [f"--set={key}={json.dumps(value)}" for key, value in keys.items()]
    argv = [sys.executable, "-m", "miles_hpc", "doctor", f"--nodes={nodes}"]
    return [*argv, *overrides, *arguments]


def doctor(slurm, tmp_path, *arguments, **changes):
    """Run the command against the rig to its end."""
    return subprocess.run(
        doctor_argv(tmp_path, *arguments, **changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**slurm.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )


def python_that_differs(tmp_path: Path, *, kind: str = "mount", **commands: str) -> str:
    """Write an interpreter that on some nodes first runs a command in a namespace of its own.

    The agent's children come through it again; they are in the namespace already.
    """
    python = shlex.quote(sys.executable)
    namespace = f"unshare --{kind}" if os.getuid() == 0 else f"unshare --map-root-user --{kind}"
    cases = ""
    for node, command in commands.items():
        inside = shlex.quote(f'{command} && exec {python} "$@"')
        cases += f'g1-{node}) INSIDE=1 exec {namespace} sh -c {inside} sh "$@" ;;\n'
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\n[ -n "$INSIDE" ] || case $SLURMD_NODENAME in\n{cases}esac\nexec {python} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def bad_findings(done) -> list[tuple[str, str, str]]:
    return [
        (finding["node"], finding["check"], finding["level"])
        for finding in json.loads(done.stdout)["findings"]
        if finding["level"] != "ok" and finding["check"] != "open files"
    ]


def processes_below(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if bytes(folder) in command and int(entry.name) != os.getpid():
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found


def assert_no_process_below(folder: Path) -> None:
    """Fail if a process still names the folder; slurmstepd may be the last to go."""
    end_s = time.monotonic() + 10
    while processes_below(folder) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert processes_below(folder) == []


def test_four_sound_nodes_give_one_table_and_leave_nothing(slurm, tmp_path):
    done = doctor(slurm, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "4 nodes fit: 0 faults" in done.stdout
    assert "ok all 4" in done.stdout
    for check in ("interpreter", "NCCL", "memory", "scratch", "network", "same Ray", "same code", "clock"):  # fmt: skip
        assert check in done.stdout
    assert [line for line in done.stdout.splitlines() if len(line) > 100] == []
    assert list((tmp_path / "runs").iterdir()) == []
    assert_no_process_below(tmp_path)


def test_every_node_says_what_was_found(slurm, tmp_path):
    done = doctor(slurm, tmp_path, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["is_fit"] is True
    assert report["nodes"] == list(slurm.nodes)
    folders = [finding for finding in report["findings"] if finding["check"] == "run folder"]
    assert [finding["node"] for finding in folders] == list(slurm.nodes[1:])
    clocks = [finding for finding in report["findings"] if finding["check"] == "clock"]
    assert [finding["node"] for finding in clocks] == list(slurm.nodes[1:])
    assert bad_findings(done) == []


def test_two_nodes_with_different_faults_are_both_named(slurm, tmp_path):
    for name in ("model", "empty", "scratch"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    python = python_that_differs(
        tmp_path,
        n02=f"mount -t tmpfs none {tmp_path}/scratch",
        n04=f"mount --bind {tmp_path}/empty {tmp_path}/model",
    )
    changes = {
        "cluster.python": python,
        "offload.scratch_root": str(tmp_path / "scratch"),
        "model.weights": "checkpoint",
        "model.hf_checkpoint": str(tmp_path / "model"),
    }
    done = doctor(slurm, tmp_path, "--json", **changes)
    assert done.returncode == 10, done.stderr + done.stdout
    assert bad_findings(done) == [
        ("g1-n02", "scratch", "fault"),
        ("g1-n04", "model and data", "fault"),
    ]
    assert "tmpfs" in done.stdout
    assert f"{tmp_path}/model: an empty folder" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []
    table = doctor(slurm, tmp_path, **changes)
    assert "FAULT g1-n02" in table.stdout
    assert "FAULT g1-n04" in table.stdout
    assert "2 of 4 nodes not fit: 2 faults" in table.stdout


def test_a_limit_that_a_job_survives_is_a_warning(slurm, tmp_path):
    python = python_that_differs(tmp_path, n03="ulimit -n 1000")
    done = doctor(slurm, tmp_path, **{"cluster.python": python})
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = [line for line in done.stdout.splitlines() if " 1000 " in line]
    assert line.split()[:4] == ["warning", "g1-n03", "open", "files"]


def test_clocks_ahead_and_behind_are_both_told(slurm, tmp_path):
    shift = tmp_path / "shift.so"
    (tmp_path / "shift.c").write_text(SHIFTED_CLOCK)
    compiler = shutil.which("cc")
    assert compiler is not None, "this test needs a C compiler"
    argv = [compiler, "-shared", "-fPIC", "-o", str(shift), str(tmp_path / "shift.c")]
    subprocess.run(argv, check=True, timeout=30)
    python = python_that_differs(
        tmp_path,
        n02=f"export LD_PRELOAD={shift} SHIFT_S=60",
        n03=f"export LD_PRELOAD={shift} SHIFT_S=-60",
    )
    done = doctor(slurm, tmp_path, "--json", **{"cluster.python": python})
    assert done.returncode == 0, done.stderr + done.stdout
    clocks = {f["node"]: f for f in json.loads(done.stdout)["findings"] if f["check"] == "clock"}
    assert [clock["level"] for clock in clocks.values()] == ["warning", "warning", "ok"]
    assert re.fullmatch(r"at least (59|60)\.\d s ahead of the head's", clocks["g1-n02"]["found"])
    assert re.fullmatch(r"at least (59|60)\.\d s behind the head's", clocks["g1-n03"]["found"])


def test_a_run_folder_that_one_node_does_not_share_is_that_nodes_fault(slurm, tmp_path):
    runs = tmp_path / "runs"
    # The node sees the folder as it was when its agent started: enough to start, but nobody hears it.
    python = python_that_differs(
        tmp_path, n03=f"cp -a {runs} {tmp_path}/stale && mount --bind {tmp_path}/stale {runs}"
    )
    done = doctor(
        slurm, tmp_path, "--json", **{"cluster.python": python, "agent.ready_deadline": "8s"}
    )
    assert done.returncode == 10, done.stderr + done.stdout
    assert bad_findings(done) == [("g1-n03", "run folder", "fault")]
    assert slurm.record(done.stderr.split()[1])["JobState"] == "FAILED"
    (kept,) = runs.iterdir()
    assert f"not every node reported; logs are in {kept}" in done.stderr
    assert "submission" in done.stdout
    assert_no_process_below(tmp_path)


def test_a_node_on_a_network_of_its_own_is_that_nodes_fault(slurm, tmp_path):
    python = python_that_differs(tmp_path, kind="net", n03="ip link set lo up")
    done = doctor(slurm, tmp_path, "--json", nodes=3, **{"cluster.python": python})
    assert done.returncode == 10, done.stderr
    assert bad_findings(done) == [("g1-n03", "network", "fault")]
    found = {f["node"]: f for f in json.loads(done.stdout)["findings"] if f["check"] == "network"}
    assert "lo 127.0.0.1" in found["g1-n03"]["found"]
    assert found["g1-n02"]["level"] == "ok"


def test_a_gpu_that_fell_off_the_bus_is_told_by_node_and_number(slurm, tmp_path):
    build_library(tmp_path)
    gpus = {
        node: f"export LD_LIBRARY_PATH={tmp_path} FAKE_NVML={'lost' if node == 'n03' else 'sound'}"
        for node in ("n01", "n02", "n03", "n04")
    }
    done = doctor(
        slurm,
        tmp_path,
        "--json",
        **{
            "cluster.python": python_that_differs(tmp_path, **gpus),
            "cluster.device": "gpu",
            "cluster.gpus_per_node": 2,
            "cluster.gpu_request": "gres",
        },
    )
    assert done.returncode == 10, done.stderr + done.stdout
    findings = json.loads(done.stdout)["findings"]
    assert [
        (finding["node"], finding["level"]) for finding in findings if finding["check"] == "GPUs"
    ] == [(node, "ok") for node in slurm.nodes]
    faults = [finding for finding in findings if finding["level"] == "fault"]
    assert {finding["node"] for finding in faults} == {"g1-n03"}
    assert "GPU 1: NVML error 15: it has fallen off the bus" in [
        finding["found"] for finding in faults
    ]
    sound = [f["node"] for f in findings if (f["check"], f["level"]) == ("GPU health", "ok")]
    assert sound == ["g1-n01", "g1-n02", "g1-n04"]


def test_a_refused_job_ends_with_4_and_slurms_words(slurm, tmp_path):
    done = doctor(slurm, tmp_path, **{"cluster.partition": "no-such-partition"})
    assert done.returncode == 4, done.stderr + done.stdout
    assert "invalid partition" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_job_that_slurm_ends_first_says_where_to_look(slurm, tmp_path):
    python = python_that_differs(tmp_path, n01="exit 9", n02="exit 9")
    done = doctor(slurm, tmp_path, nodes=2, **{"cluster.python": python})
    assert done.returncode == 11, done.stderr + done.stdout
    assert "ended without a report" in done.stderr
    (kept,) = (tmp_path / "runs").iterdir()
    assert str(kept) in done.stderr


def test_ctrl_c_ends_the_job_and_leaves_nothing(slurm, tmp_path):
    python = python_that_differs(tmp_path, n02=f"touch {tmp_path}/running && sleep 100")
    process = subprocess.Popen(
        doctor_argv(tmp_path, nodes=2, **{"cluster.python": python}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**slurm.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    try:
        end_s = time.monotonic() + 60
        while not (tmp_path / "running").exists():
            assert time.monotonic() < end_s
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait(timeout=20)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    job_id = said.split()[1]
    assert slurm.wait_for_job(job_id)["JobState"] in ("CANCELLED", "FAILED")
    assert list((tmp_path / "runs").iterdir()) == []
    assert_no_process_below(tmp_path)


def test_the_verdict_of_a_job_names_the_faults_of_all_nodes(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=4)
    bad = {
        "g1-n02": {
            "scratch": ScratchRequest(root="/dev/shm", min_free_bytes=1, allow_memory=False)
        },
        "g1-n03": {"nccl": NcclPin(path="/none.so", version_code=23007, preload=True)},
    }
    commands = {}
    for node, changes in bad.items():
        variant = write_variant(run, tmp_path / node, **changes)
        argv = shlex.join(node_argv(handoff_of(run)))
        commands[node] = argv.replace(str(run.root), str(variant.root))
    record = slurm.wait_for_job(submit(slurm, run, on_node=commands))
    assert record["ExitCode"] == "10:0", outputs(run)
    lines = verdict_of(run).reason.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("g1-n02: scratch: found /dev/shm")
    assert lines[1].startswith("g1-n03: NCCL: found /none.so")


def test_the_verdict_of_an_unfit_head_names_the_other_nodes_too(slurm, tmp_path):
    run = write_run(tmp_path / "run", NEVER, num_nodes=3, memory_bytes=1 << 60)
    fit = replace(handoff_of(run), memory_bytes=None)
    variant = write_variant(run, tmp_path / "fit", memory_bytes=fit.memory_bytes)
    argv = shlex.join(node_argv(handoff_of(run)))
    on_node = {"g1-n02": argv.replace(str(run.root), str(variant.root))}
    record = slurm.wait_for_job(submit(slurm, run, on_node=on_node))
    assert record["ExitCode"] == "10:0", outputs(run)
    nodes = [line.partition(":")[0] for line in verdict_of(run).reason.splitlines()]
    assert nodes == ["g1-n01", "g1-n03"]
    wait_for(lambda: not processes_of(run), "end of all processes", run, timeout_s=10)
