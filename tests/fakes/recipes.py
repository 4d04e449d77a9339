"""The recipes of jobs/ loaded and planned, and run folders in every state, for tests of the login node."""

import json
import time
from pathlib import Path

import pytest

from miles_hpc.engine.compose import compose_plan
from miles_hpc.launch.bundle import make_handoff
from miles_hpc.paths import RunDir
from miles_hpc.run.events import EventLog
from miles_hpc.run.resume import Identity, Verdict, new_attempt, write_verdict
from miles_hpc.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = tuple(sorted(ROOT.glob("jobs/*.toml")))
RECIPES = tuple(
    ROOT / "jobs" / f"{name}.toml"
    for name in ("demo", "demo_tiny", "glm52_lora_tb2", "qwen38_4layer", "qwen38_full")
)
"""The recipes of every kind of job, whose whole plans and scripts are golden; of the others what matters is."""
PYTHON = "/opt/venv/bin/python"


def load_recipe(
    path: Path = ROOT / "jobs" / "demo_tiny.toml", *overrides: str, local: bool = False
):
    """Return the loaded spec and its plan."""
    loaded = load_spec(path, overrides=overrides, local=local)
    plan = compose_plan(
        loaded.spec, python=PYTHON, package_version="0", overrides=overrides, hashes=loaded.hashes
    )
    return loaded, plan


@pytest.fixture
def demo():
    """Load demo_tiny with overrides."""
    return lambda *overrides: load_recipe(ROOT / "jobs" / "demo_tiny.toml", *overrides)


@pytest.fixture
def make_run(tmp_path):
    """Make a run folder that was submitted, with one attempt per entry of `attempts`: None, or its verdict."""

    def make(*attempts, job_id="4100", cluster="slurm", submitted=True, events=(), details=()):
        run = RunDir(tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}")
        run.attempts_root.mkdir(parents=True)
        run.submission.mkdir()
        loaded, plan = load_recipe()
        run.handoff.write_text(make_handoff(loaded.spec, plan, run, cluster=cluster).to_json())
        if submitted:
            job = {
                "job_id": job_id,
                "cluster": cluster,
                "submitted_s": time.time(),
                **dict(details),
            }
            run.job.write_text(json.dumps(job))
        for number, verdict in enumerate(attempts):
            identity = Identity(
                job_id=job_id,
                restart_count=number,
                cluster=cluster,
                head_node="n1",
                started_s=time.time(),
            )
            attempt = new_attempt(
                run, identity, resume="auto", max_attempts=9, is_live=lambda _: False
            )
            if verdict is not None:
                write_verdict(attempt, verdict)
            for kind, fields in events:
                EventLog(attempt.node_events("n1"), "n1").append(kind, **fields)
        return run

    return make


def verdict(
    state: str, exit_code: int = 0, driver: int | None = None, reason: str = "why"
) -> Verdict:
    """Return a verdict that was just given."""
    return Verdict(
        state=state,
        exit_code=exit_code,
        driver_exit_code=driver,
        reason=reason,
        ended_s=time.time(),
    )
