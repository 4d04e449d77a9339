"""Who a node is, from the variables of Slurm and submitit; a contradiction is never settled by a guess."""

import os
import time
from pathlib import Path

import pytest

from miles_hpc.errors import PreflightError
from miles_hpc.slurm import (
    expand_nodelist,
    identify_node,
    is_job_live,
    job_end_s,
    parse_node_address,
    requeue_refusal,
)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a scontrol on PATH that prints the names it is given in a file; returns that file."""
    names = tmp_path / "names"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && cat "{names}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}/bin:/usr/bin")
    return names


def slurm_environ(**changes: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "71",
        "SLURM_JOB_NODELIST": "g1-n[01-03]",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NODEID": "1",
        "SLURMD_NODENAME": "g1-n02",
        **changes,
    }


def test_slurms_variables_name_node_index_and_head(scontrol):
    scontrol.write_text("g1-n01\ng1-n02\ng1-n03\n")
    identity = identify_node("slurm", slurm_environ(SLURM_RESTART_COUNT="2"))
    assert (identity.node, identity.node_index, identity.head_node) == ("g1-n02", 1, "g1-n01")
    assert (identity.job_id, identity.restart_count, identity.is_head) == ("71", 2, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_NODEID": "0"},
        {"SLURM_NODEID": "3"},
        {"SLURM_NODEID": "one"},
        {"SLURM_NODEID": ""},
        {"SLURMD_NODENAME": "g1-n2"},
        {"SLURMD_NODENAME": ""},
        {"SLURM_JOB_NUM_NODES": "4"},
        {"SLURM_JOB_ID": ""},
        {"SLURM_JOB_NODELIST": ""},
    ],
)
def test_a_missing_or_contradicting_variable_raises_and_is_named(scontrol, changes):
    scontrol.write_text("g1-n01\ng1-n02\ng1-n03\n")
    with pytest.raises(PreflightError, match=next(iter(changes))):
        identify_node("slurm", slurm_environ(**changes))


def test_without_scontrol_the_node_list_is_not_guessed(tmp_path):
    with pytest.raises(PreflightError, match="scontrol"):
        expand_nodelist("n[1-2]", {"PATH": str(tmp_path)})


def test_submitits_local_tasks_are_nodes():
    environ = {
        "SUBMITIT_LOCAL_JOB_ID": "4711",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_NTASKS": "2",
    }
    identity = identify_node("local", environ)
    assert (identity.node, identity.nodes, identity.restart_count) == (
        "local1", ("local0", "local1"), 0,
    )  # fmt: skip
    with pytest.raises(PreflightError, match="GLOBALID=2"):
        identify_node("local", {**environ, "SUBMITIT_LOCAL_GLOBALID": "2"})


def test_node_address_is_read_from_slurms_record():
    record = "NodeName=n1 Arch=x86_64 NodeAddr=10.77.0.11 NodeHostName=n1 Version=22.05.8"
    assert parse_node_address(record) == "10.77.0.11"
    assert parse_node_address("NodeName=n1") is None


def test_a_local_job_lives_as_long_as_its_controller():
    assert not is_job_live(str(os.getpid()), "local"), "this process is no controller"
    assert not is_job_live("999999999", "local")


@pytest.mark.parametrize(
    ("script", "live"),
    [
        ("echo RUNNING", True),
        ("echo COMPLETED", False),
        ("true", False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", True),
    ],
)
def test_a_job_is_dead_only_when_slurm_says_so(tmp_path, monkeypatch, script, live):
    program = Path(tmp_path, "squeue")
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert is_job_live("71", "slurm") is live


def fake_program(folder: Path, name: str, script: str, monkeypatch) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_slurms_own_variable_tells_when_the_job_ends(tmp_path, monkeypatch):
    fake_program(tmp_path, "squeue", "exit 1", monkeypatch)
    assert job_end_s("71", {"SLURM_JOB_END_TIME": "1764820000"}) == 1764820000.0


@pytest.mark.parametrize(
    ("answer", "left_s"),
    [
        ("echo 1:30", 90),
        ("echo 2:00:00", 7200),
        ("echo 1-00:00:00", 86400),
        ("echo UNLIMITED", None),
        ("echo INVALID", None),
        ("true", None),
        ("echo 1:30; exit 1", None),
    ],
)
def test_an_older_slurm_is_asked_for_the_time_that_is_left(tmp_path, monkeypatch, answer, left_s):
    fake_program(tmp_path, "squeue", answer, monkeypatch)
    before_s = time.time()
    end_s = job_end_s("71", {})
    if left_s is None:
        assert end_s is None
    else:
        assert end_s is not None
        assert before_s + left_s <= end_s <= time.time() + left_s


def test_a_requeue_passes_on_why_slurm_refused(tmp_path, monkeypatch):
    fake_program(
        tmp_path, "scontrol", 'test "$*" = "requeue 71" || { echo no >&2; exit 1; }', monkeypatch
    )
    assert requeue_refusal("71") is None
    assert "no" in (requeue_refusal("72") or "")
