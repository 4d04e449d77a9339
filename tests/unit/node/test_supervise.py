"""Children, signals, survivors and the guard, with real processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from miles_hpc.node.supervise import StopRequest, start_child, start_reporter, tail
from miles_hpc.node.survivors import TAG_VARIABLE, end_survivors, owned_processes
from miles_hpc.node.teardown import shared_memory_files

ROOT = Path(__file__).resolve().parents[3]
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(tmp_path, source: str, **environ: str):
    return start_child(
        "child", [sys.executable, "-c", source], environ=environ, log=tmp_path / "log"
    )


def wait_for(look, timeout_s: float = 20.0):
    end_s = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path):
    child = python(tmp_path, STUBBORN)
    wait_for(lambda: "up" in child.log_tail())
    start_s = time.monotonic()
    assert child.terminate(grace_s=0.3) == -signal.SIGKILL
    assert time.monotonic() - start_s >= 0.3


def test_a_grace_can_be_cut(tmp_path):
    child = python(tmp_path, STUBBORN)
    wait_for(lambda: "up" in child.log_tail())
    assert child.terminate(grace_s=3600, cut=lambda: True) == -signal.SIGKILL


def test_a_signal_to_the_agents_group_does_not_reach_a_child(tmp_path):
    child = python(tmp_path, "import time; time.sleep(60)")
    assert os.getpgid(child.process.pid) == child.process.pid != os.getpgid(0)
    assert os.getsid(child.process.pid) == child.process.pid
    child.terminate(grace_s=5)


def test_a_reporters_lines_arrive_whole(tmp_path):
    source = "import sys, time; sys.stdout.write('a\\nb'); sys.stdout.flush(); time.sleep(0.3); print('c')"
    child, reader = start_reporter(
        "probe", [sys.executable, "-c", source], environ={}, log=tmp_path / "log"
    )
    seen: list[str] = []
    wait_for(lambda: seen.extend(reader.lines()) or len(seen) == 2)
    assert seen == ["a", "bc"]
    assert child.process.wait(timeout=10) == 0


def test_survivors_are_found_by_tag_and_ended(tmp_path):
    child = python(tmp_path, STUBBORN, **{TAG_VARIABLE: "tag-of-this-test"})
    other = python(tmp_path, "import time; time.sleep(60)", **{TAG_VARIABLE: "tag-of-this-test-2"})
    wait_for(lambda: "up" in child.log_tail())
    assert owned_processes("tag-of-this-test", descendants=False) == {child.process.pid}
    other.terminate(grace_s=5)
    killed = end_survivors("tag-of-this-test", (child,), grace_s=0.2)
    assert [line.split()[0] for line in killed] == [str(child.process.pid)]
    assert child.poll() == -signal.SIGKILL


def test_two_signals_at_once_are_one_request():
    stop = StopRequest()
    stop._note(signal.SIGTERM, None)
    stop._note(signal.SIGTERM, None)
    assert (stop.count, stop.signal_name) == (1, "SIGTERM")
    stop._last_s -= 10
    stop._note(signal.SIGINT, None)
    assert (stop.count, stop.signal_name) == (2, "SIGTERM")


def test_the_end_of_a_log_is_shown_or_why_not(tmp_path):
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(5000)))
    assert tail(tmp_path / "log", 2) == "line 4998\nline 4999"
    assert "No such file" in tail(tmp_path / "none", 2)


def test_shared_memory_that_a_process_maps_is_found():
    from multiprocessing import resource_tracker, shared_memory

    block = shared_memory.SharedMemory(create=True, size=4096)
    try:
        assert Path("/dev/shm") / block.name in shared_memory_files(frozenset({os.getpid()}))
    finally:
        block.close()
        block.unlink()
        resource_tracker.ensure_running()


GUARDED = """
    import os, subprocess, sys, time
    from miles_hpc.node.guard import Word, guard
    from miles_hpc.node.supervise import StopRequest

    folder, how = sys.argv[1:]

    def serve(leave_word):
        stop = StopRequest()
        stop.install()
        leave_word(Word(node="n2", is_head=how == "head", attempt_root=folder, attempt_key="7-0",
                        job_tag="guard-test-tag", folders=(folder + "/scratch",)))
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                                 env={"MILES_HPC_JOB_TAG": "guard-test-tag"}, start_new_session=True)
        print(os.getpid(), child.pid, flush=True)
        while how != "code":
            time.sleep(0.02)
            if stop.signal_name:
                child.kill()
                child.wait()
                return 42
        child.kill()
        child.wait()
        return 41

    sys.exit(guard(serve))
"""


def guarded(tmp_path, how: str) -> tuple[subprocess.Popen, int, int]:
    (tmp_path / "rendezvous").mkdir()
    (tmp_path / "scratch").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(GUARDED), str(tmp_path), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    agent, child = (int(word) for word in process.stdout.readline().split())
    return process, agent, child


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_guard_passes_the_agents_exit_code_on(tmp_path):
    process, _, _ = guarded(tmp_path, "code")
    assert process.wait(timeout=20) == 41


def test_the_guard_passes_a_signal_on(tmp_path):
    process, agent, child = guarded(tmp_path, "wait")
    process.terminate()
    assert process.wait(timeout=20) == 42
    assert not is_alive(agent)
    assert not is_alive(child)


@pytest.mark.parametrize("how", ["wait", "head"])
def test_the_guard_cleans_up_after_a_killed_agent_and_names_it(tmp_path, how):
    process, agent, child = guarded(tmp_path, how)
    os.kill(agent, signal.SIGKILL)
    assert process.wait(timeout=20) == 11
    assert not is_alive(child)
    assert not (tmp_path / "scratch").exists()
    name = "verdict.json" if how == "head" else "rendezvous/failed-n2.json"
    said = json.loads((tmp_path / name).read_text())
    assert "killed by signal 9" in said["reason" if how == "head" else "message"]
    assert (tmp_path / "rendezvous" / "gone-n2").exists()


def test_a_killed_guard_lets_the_agent_end_in_order(tmp_path):
    process, agent, child = guarded(tmp_path, "wait")
    process.kill()
    process.wait(timeout=20)
    wait_for(lambda: not is_alive(agent) and not is_alive(child))
