"""`submit --cluster local` for real: submitit's controller, two agents, the terminal's Ctrl-C, exit codes, cancel, logs."""

import json
import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest

from miles_hpc.run.resume import read_verdict
from tests.fakes.submission import ROOT, SPEC, command, miles_hpc, only_run, wait_for

pytestmark = pytest.mark.timeout(120)


def local(tmp_path, *arguments):
    return (
        "submit",
        str(SPEC),
        "--cluster",
        "local",
        "--set",
        f"job.run_root={json.dumps(str(tmp_path))}",
        *arguments,
    )


def seen_by(run):
    return json.loads((run.attempt(1).root / "seen.json").read_text())


def end(run):
    miles_hpc("cancel", str(run.root))


def test_a_job_runs_to_its_end_and_status_tells_it(tmp_path):
    done = miles_hpc(*local(tmp_path, "--json", "--wait"), stub={"steps": 2})
    run = only_run(tmp_path)
    assert done.returncode == 0, done.stderr
    job = json.loads(run.job.read_text())
    assert json.loads(done.stdout) == {
        "run_dir": str(run.root),
        "job_id": job["job_id"],
        "cluster": "local",
    }
    told = json.loads(miles_hpc("status", str(run.root), "--json").stdout)
    assert told == {
        "run_dir": str(run.root),
        "job_id": job["job_id"],
        "state": "COMPLETED",
        "attempt": 1,
        "exit_code": 0,
        "driver_exit_code": 0,
        "reason": "the stub ended with 0",
        "cause": "unknown",
        "evidence": "",
    }
    assert "step 2/2  reward 0.500  120 tokens/s  1min 15s left" in done.stderr
    assert miles_hpc("logs", str(run.root)).stdout == "[local0] step 1\n[local0] step 2\n"


def test_a_failed_run_is_resumed_by_a_further_job_in_the_same_folder(tmp_path):
    done = miles_hpc(*local(tmp_path, "--wait"), stub={"steps": 1, "exit_code": 12})
    run = only_run(tmp_path)
    assert done.returncode == 12
    (run.root / "stub.json").write_text('{"steps": 1}')
    assert miles_hpc("resume", str(run.root)).returncode == 0
    wait_for(lambda: run.attempt(2).verdict.exists())
    told = json.loads(miles_hpc("status", str(run.root), "--json").stdout)
    assert (told["state"], told["attempt"]) == ("COMPLETED", 2)


def test_both_agents_run_the_frozen_code_in_the_run_folder(tmp_path):
    miles_hpc(*local(tmp_path, "--wait"), stub={}, cwd=ROOT)
    run = only_run(tmp_path)
    seen = seen_by(run)
    assert seen["cwd"] == str(run.root)
    assert Path(seen["code"]).is_relative_to(run.code)
    assert seen["environ"]["PYTHONPATH"] == str(run.code)
    assert sorted(path.name for path in run.submission.glob("*_log.out")) == [
        f"{json.loads(run.job.read_text())['job_id']}_{task}_log.out" for task in (0, 1)
    ]
    assert list(run.submission.glob("*result.pkl")) == []


@pytest.mark.parametrize("code", [10, 11, 12, 13, 1])
def test_wait_returns_the_jobs_own_exit_code(tmp_path, code):
    done = miles_hpc(*local(tmp_path, "--wait"), stub={"exit_code": code})
    assert done.returncode == code
    assert f"FAILED: the stub ended with {code}" in done.stderr


def test_an_agent_that_dies_without_a_word_is_a_failure(tmp_path):
    done = miles_hpc(*local(tmp_path, "--wait"), stub={"exit_code": "no number"})
    assert done.returncode == 1
    assert "no verdict" in done.stderr


def test_without_wait_the_command_returns_and_the_job_survives_it(tmp_path):
    done = miles_hpc(*local(tmp_path), stub={"hold": True})
    run = only_run(tmp_path)
    assert done.stdout == f"{run.root}\n"
    wait_for(lambda: list(run.attempts()))
    assert json.loads(miles_hpc("status", str(run.root), "--json").stdout)["state"] == "RUNNING"
    cancelled = miles_hpc("cancel", str(run.root), "--json")
    assert json.loads(cancelled.stdout)["state"] == "CANCELLED"
    assert "signal 15" in read_verdict(run.attempt(1)).reason


def test_ctrl_c_and_a_closed_terminal_detach_and_the_job_goes_on(tmp_path):
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        command(*local(tmp_path), stub={"hold": True}),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        start_new_session=True,
    )
    os.close(terminal)
    output = b""
    try:
        while b"attempt 1 RUNNING" not in output:
            chunk = read_some(main)
            assert chunk, output
            output += chunk
        os.killpg(process.pid, signal.SIGINT)
        while process.poll() is None:
            output += read_some(main)
        output += read_some(main)
    finally:
        process.kill()
        os.close(main)
    run = only_run(tmp_path)
    assert process.returncode == 130
    assert f"miles-hpc cancel {run.root}".encode() in output.replace(b"\r\n", b"")
    assert json.loads(miles_hpc("status", str(run.root), "--json").stdout)["state"] == "RUNNING"
    end(run)
    assert read_verdict(run.attempt(1)).state == "CANCELLED"


def read_some(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def test_killing_the_command_does_not_kill_the_job(tmp_path):
    process = subprocess.Popen(
        command(*local(tmp_path, "--wait"), stub={"hold": True}),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert process.stdout is not None
    root = Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()
    run = only_run(tmp_path)
    assert run.root == root
    wait_for(lambda: list(run.attempts()))
    assert json.loads(miles_hpc("status", str(root), "--json").stdout)["state"] == "RUNNING"
    end(run)


def test_logs_follow_until_the_run_has_ended(tmp_path):
    miles_hpc(*local(tmp_path), stub={"steps": 4})
    run = only_run(tmp_path)
    followed = miles_hpc("logs", "-f", str(run.root))
    assert followed.returncode == 0
    assert followed.stdout.splitlines() == [f"[local0] step {step}" for step in range(1, 5)]


def test_the_time_limit_ends_a_local_job_as_a_failure(tmp_path):
    done = miles_hpc(*local(tmp_path, "--wait", "--set", "job.time_limit=3s"), stub={"hold": True})
    assert done.returncode == 1
    assert "time_limit is over" in done.stderr


def test_a_hostile_folder_name_works_from_end_to_end(weird_tmp_path):
    folder = weird_tmp_path.parent / 'a b\'s $HOME, "ü" ; -rf #'
    done = miles_hpc(*local(folder, "--wait"), stub={"steps": 1})
    assert done.returncode == 0, done.stderr
    run = only_run(folder)
    assert done.stdout == f"{run.root}\n"
    assert miles_hpc("logs", str(run.root)).stdout == "[local0] step 1\n"


def test_without_submitit_the_message_names_the_other_way(tmp_path):
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "submitit.py").write_text("raise ImportError('no submitit here')")
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'shadow'}"}
    done = subprocess.run(
        command(*local(tmp_path / "runs")),
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 4
    assert "render SPEC -o DIR" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []
