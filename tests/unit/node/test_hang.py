"""A driver that goes silent is noticed, and where its processes stand is written down; all with real processes."""

import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles_hpc.node import hang
from miles_hpc.node.hang import HangError, HangWatch, answer_stacks
from miles_hpc.node.stacks import catches, find_py_spy
from miles_hpc.node.survivors import TAG_VARIABLE
from miles_hpc.probe.nccl_hook import PYTHON_START
from miles_hpc.run.events import Kind, read_events
from miles_hpc.run.silence import Silence

ROOT = Path(__file__).resolve().parents[3]
WAITING = """
    import os, sys, time
    def waits_for_its_peers():
        print("up", flush=True)
        time.sleep(600)

    if sys.argv[1] == "forked" and os.fork():
        os.wait()
    waits_for_its_peers()
"""


@pytest.fixture
def start(tmp_path, make_context):
    """Return a function that starts a process of the job, which ends with the test."""
    started = []

    def begin(context, how):
        temp = tmp_path / "tmp"
        temp.mkdir(exist_ok=True)
        tag = {TAG_VARIABLE: context.job_tag, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
        if how != "plain":
            tag["MILES_HPC_RUN_DIR"] = str(context.run.root)
            tag["PYTHONPATH"] = f"{PYTHON_START}:{ROOT}"
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WAITING), how],
            env={**os.environ, **tag},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "up\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def context(make_context, tmp_path):
    """The context of the one node of a job, without py-spy beside its Python."""
    found = make_context()
    found = replace(found, identity=replace(found.identity, nodes=("n1",)))
    found = replace(found, handoff=replace(found.handoff, python=str(tmp_path / "bin" / "python")))
    found.rendezvous.open()
    return found


def stacks_of(context, tmp_path, monkeypatch, path=""):
    monkeypatch.setenv("PATH", path)
    context.rendezvous.want_stacks("phase train")
    answer_stacks(context, tmp_path / "tmp")
    return context.attempt.stacks("n1").read_text()


def test_a_process_that_registered_tells_its_stack_and_goes_on(
    context, start, tmp_path, monkeypatch
):
    process = start(context, "registered")
    assert catches(process.pid)
    text = stacks_of(context, tmp_path, monkeypatch)
    assert f"process {process.pid}: " in text
    assert "in waits_for_its_peers" in text
    assert "wait channel S " in text
    assert process.poll() is None
    assert context.rendezvous.have_stacks() == {"n1"}


def test_a_forked_child_tells_its_own_stack(context, start, tmp_path, monkeypatch):
    parent = start(context, "forked")
    text = stacks_of(context, tmp_path, monkeypatch)
    child = next(
        pid for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    )
    told = text.partition(f"process {child}: ")[2].partition("process ")[0]
    assert "in waits_for_its_peers" in told
    os.kill(int(child), 9)


def test_a_process_without_a_handler_is_not_signalled(context, start, tmp_path, monkeypatch):
    process = start(context, "plain")
    assert not catches(process.pid)
    text = stacks_of(context, tmp_path, monkeypatch)
    assert "no Python stack: no py-spy" in text
    assert "wait channel S " in text
    assert process.poll() is None


def test_py_spy_is_asked_where_it_is_installed(context, start, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "Thread $3 (idle): all_reduce"\n')
    program.chmod(0o755)
    process = start(context, "registered")
    text = stacks_of(context, tmp_path, monkeypatch)
    assert f"Thread {process.pid} (idle): all_reduce" in text
    program.write_text("#!/bin/sh\necho permission denied >&2\nexit 1\n")
    (context.rendezvous.root / "stacks-n1").unlink()
    text = stacks_of(context, tmp_path, monkeypatch)
    assert "permission denied" in text
    assert "in waits_for_its_peers" in text


def test_py_spy_on_path_is_found_too(tmp_path, monkeypatch):
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_py_spy(Path("/nowhere/python")) == str(program)


def watch(context, tmp_path, **silence):
    return HangWatch(context, Silence(**silence), floor_s=0.2, temp=tmp_path / "tmp")


def test_silence_within_a_phase_ends_the_attempt_and_names_it(context, tmp_path):
    looker = watch(context, tmp_path, phase="train", step=7, num_events=3)
    looker.look()
    time.sleep(0.25)
    with pytest.raises(
        HangError, match=r"in phase train of step 7; expected one within 0 s"
    ) as caught:
        looker.look()
    assert caught.value.exit_code == 12
    assert context.attempt.stacks("n1").exists()
    (event,) = [e for e in read_events(context.events.path) if e["kind"] == Kind.HANG]
    assert (event["phase"], event["step"]) == ("train", 7)


def test_every_event_starts_the_clock_again(context, tmp_path):
    looker = watch(context, tmp_path, phase="train", num_events=1)
    for _ in range(4):
        time.sleep(0.1)
        looker.silence.num_events += 1
        looker.look()


def test_a_driver_that_tells_no_phase_is_not_judged(context, tmp_path):
    looker = watch(context, tmp_path)
    time.sleep(0.25)
    looker.look()


def test_a_node_that_does_not_answer_is_named(context, tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "_STACKS_WAIT_S", 0.1)
    two = replace(context, identity=replace(context.identity, nodes=("n1", "n2")))
    looker = watch(two, tmp_path, phase="train")
    time.sleep(0.25)
    with pytest.raises(HangError, match="none of n2"):
        looker.look()


def test_nothing_is_written_until_the_head_asks(context, tmp_path):
    answer_stacks(context, tmp_path / "tmp")
    assert not context.attempt.stacks("n1").exists()
