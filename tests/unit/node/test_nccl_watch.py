"""Which processes of a job use another NCCL than the pinned one: real processes with compiled stand-ins of the library."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from miles_hpc.errors import NodeError
from miles_hpc.handoff import NcclPin
from miles_hpc.node.host_memory import OwnProcesses
from miles_hpc.node.nccl_watch import NcclWatch, NcclWatcher, make_watch, watching_nccl
from miles_hpc.probe.nccl_hook import PYTHON_START
from miles_hpc.run.events import read_events
from miles_hpc.run.json_lines import JsonLineTail
from tests.fakes.nccl import make_nccl

ROOT = Path(__file__).resolve().parents[3]
HOLD = "; print('up', flush=True); import sys; sys.stdin.read()"
PIN = NcclPin(path=None, version_code=23007, preload=True)


@pytest.fixture
def pinned(tmp_path):
    return make_nccl(tmp_path / "pinned", 23007)


@pytest.fixture
def own(tmp_path):
    return make_nccl(tmp_path / "own", 22809)


@pytest.fixture
def watch(tmp_path, pinned):
    return NcclWatch(
        pin=PIN,
        library=pinned,
        node="n1",
        proofs=JsonLineTail(tmp_path / "events.jsonl"),
        processes=OwnProcesses(os.getpid()),
        ask_version=lambda path: 22809 if "own" in path else None,
    )


@contextmanager
def process(source, *options, **environ):
    """Run Python source and keep the process until the block ends."""
    with subprocess.Popen(
        [sys.executable, *options, "-c", source + HOLD],
        env={**os.environ, "PYTHONPATH": f"{PYTHON_START}:{ROOT}", **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"up\n"
        yield child


def load(*paths):
    return "import ctypes; " + "; ".join(
        f"ctypes.CDLL({str(path)!r}, mode=ctypes.RTLD_GLOBAL)" for path in paths
    )


def test_processes_without_nccl_or_with_the_pinned_one_alone_are_fit(watch, pinned, tmp_path):
    alias = tmp_path / "alias"
    alias.symlink_to(pinned.parent)
    with process("pass"), process(load(pinned)), process(load(alias / pinned.name)):
        for now_s in (0.0, 1.0, 99.0):
            assert watch.look(now_s) == ()


def test_a_process_on_another_nccl_is_named_with_what_it_has(watch, own, pinned):
    with process(load(own)) as child:
        assert watch.look(0.0) == ()
        (fault,) = watch.look(1.0)
        assert fault.where == f"n1: NCCL of pid {child.pid} ({Path(sys.executable).name} -c)"
        assert fault.found == f"22809 (2.28.9) from {own}"
        assert fault.expected == f"23007 (2.30.7) from {pinned}"
        assert watch.look(2.0) == ()


def test_two_libraries_without_a_word_are_waited_for_and_then_refused(watch, own, pinned):
    with process(load(pinned, own)):
        assert watch.look(0.0) == watch.look(14.9) == ()
        (fault,) = watch.look(15.1)
        assert "beside the pinned library, and no word of the process" in fault.found


def test_the_word_of_a_process_that_has_both_settles_it(watch, own, pinned, tmp_path):
    environ = {
        "MILES_HPC_NCCL": str(pinned),
        "MILES_HPC_EVENTS": str(tmp_path / "events.jsonl"),
        "LD_PRELOAD": str(pinned),
    }
    with process(load(own), **environ):
        for now_s in (0.0, 20.0, 40.0):
            assert watch.look(now_s) == ()


def test_a_word_of_another_version_or_file_is_refused_though_its_process_has_ended(
    watch, own, pinned, tmp_path
):
    environ = {
        "MILES_HPC_NCCL": str(pinned),
        "MILES_HPC_EVENTS": str(tmp_path / "events.jsonl"),
    }
    same = make_nccl(tmp_path / "same", 23007)
    for library, found in ((own, "22809 (2.28.9)"), (same, "23007 (2.30.7)")):
        with process("pass", LD_PRELOAD=str(library), **environ):
            pass
        (fault,) = watch.look(0.0)
        assert fault.found == f"{found} from {library}"


def test_a_library_that_a_process_maps_later_is_seen(watch, own):
    source = f"print('before', flush=True); import sys; sys.stdin.readline(); {load(own)}"
    child = subprocess.Popen(
        [sys.executable, "-c", source + HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout.readline() == b"before\n"
        assert watch.look(0.0) == watch.look(1.0) == ()
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"up\n"
        watch.look(2.0)
        assert len(watch.look(3.0)) == 1


def test_a_process_that_has_ended_meanwhile_is_none(watch, own):
    with process(load(own)):
        assert watch.look(0.0) == ()
    assert watch.look(1.0) == ()


def test_the_version_of_a_library_without_a_word_is_asked_of_the_library(make_context, own, pinned):
    context = make_context()
    found = make_watch(context, PIN, pinned, {"PYTHONPATH": str(ROOT)})
    assert found.ask_version(str(own)) == 22809
    assert found.ask_version("/nonexistent") is None


def test_a_mismatch_ends_the_job_or_warns(make_context, watch, own):
    for action in ("fail", "warn"):
        context = make_context()
        watch.pin = NcclPin(path=None, version_code=23007, preload=True, on_mismatch=action)
        watcher = NcclWatcher(context, watch)
        with process(load(own)):
            watcher.look(0.0)
            watcher.look(1.0)
        warnings = [str(e["message"]) for e in read_events(context.events.path)]
        if action == "fail":
            assert isinstance(context.stop.error, NodeError)
            assert "22809 (2.28.9)" in str(context.stop.error)
            assert warnings == []
        else:
            assert context.stop.error is None
            assert "22809 (2.28.9)" in warnings[0]


def test_the_thread_finds_it_and_the_end_of_the_watch_says_it(make_context, own, pinned):
    context = make_context()
    end_s = time.monotonic() + 60

    def watched():
        with watching_nccl(context, pinned, {"PYTHONPATH": str(ROOT)}), process(load(own)):
            while context.stop.error is None and time.monotonic() < end_s:
                time.sleep(0.05)

    with pytest.raises(NodeError, match=r"22809 \(2\.28\.9\)"):
        watched()


def test_a_job_without_a_pin_is_not_watched(make_context, own):
    context = make_context(nccl=None)
    with watching_nccl(context, None, {}), process(load(own)):
        pass
    assert context.stop.error is None
