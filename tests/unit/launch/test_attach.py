"""The tunnel to the dashboard: quoted, to the head node of the attempt that runs, and refused when there is nothing to reach."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from miles_hpc.errors import QueueError
from miles_hpc.launch.attach import find_tunnel
from miles_hpc.paths import RunDir
from tests.fakes.submission import ROOT

HOSTILE_NODE = "n1;touch /x $(id)'"


def write_attempt(run: RunDir, number: int, *, node: str, port: int | None, cluster="slurm"):
    attempt = run.attempt(number)
    attempt.root.mkdir(parents=True)
    identity = {"job_id": "7", "restart_count": 0, "cluster": cluster, "head_node": node}
    attempt.identity.write_text(json.dumps(identity))
    attempt.resolved.write_text(json.dumps({"dashboard_port": port}))
    return attempt


@pytest.fixture
def run(tmp_path):
    (tmp_path / "handoff.json").write_text("{}")
    return RunDir(tmp_path)


def test_the_command_tunnels_to_the_last_attempts_head_and_is_quoted(run):
    write_attempt(run, 9, node="old", port=1)
    attempt = write_attempt(run, 10, node=HOSTILE_NODE, port=8270)
    tunnel = find_tunnel(run)
    assert shlex.split(tunnel.command) == [
        "ssh", "-N", "-L", "127.0.0.1:8270:127.0.0.1:8270", "--", HOSTILE_NODE,
    ]  # fmt: skip
    assert tunnel.url == "http://127.0.0.1:8270"
    assert tunnel.token == attempt.rendezvous / "ray_token"


def test_what_cannot_be_reached_is_told_apart(run):
    with pytest.raises(QueueError, match="no running attempt"):
        find_tunnel(run)
    attempt = write_attempt(run, 1, node="n1", port=None)
    with pytest.raises(QueueError, match=r"agent\.dashboard = true"):
        find_tunnel(run)
    attempt.verdict.write_text("{}")
    with pytest.raises(QueueError, match="no running attempt"):
        find_tunnel(run)


def test_a_job_on_this_machine_needs_no_tunnel(run):
    write_attempt(run, 1, node="local0", port=8270, cluster="local")
    assert find_tunnel(run).argv == ()


def attach(run, *arguments, path):
    return subprocess.run(
        [sys.executable, "-m", "miles_hpc.cli", "attach", str(run.root), *arguments],
        env={**os.environ, "PATH": str(path), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_open_runs_ssh_and_no_shell(run, tmp_path):
    write_attempt(run, 1, node=HOSTILE_NODE, port=8270)
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    assert attach(run, "--open", path=ssh.parent).returncode == QueueError.exit_code
    ssh.write_text(f"#!{sys.executable}\nimport json, sys; print(json.dumps(sys.argv[1:]))\n")
    ssh.chmod(0o755)
    done = attach(run, "--open", path=ssh.parent)
    assert json.loads(done.stdout)[-1] == HOSTILE_NODE, done.stderr
    printed = attach(run, path=ssh.parent)
    assert printed.stdout.strip() == find_tunnel(run).command
    assert "token" in printed.stderr
