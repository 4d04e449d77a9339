"""`resume` as a user runs it: what is refused before anything is queued, and what a further job gets."""

import json
import os
from pathlib import Path

import pytest

from miles_hpc.paths import RunDir
from miles_hpc.run.resume import Identity, Verdict, new_attempt, write_verdict
from tests.fakes.recipes import ROOT
from tests.fakes.submission import miles_hpc, only_run


def submitted(tmp_path: Path, *overrides: str) -> RunDir:
    """Submit the demo to the fake Slurm."""
    sets = [word for text in (f"job.run_root={tmp_path}", *overrides) for word in ("--set", text)]
    done = miles_hpc("submit", str(ROOT / "jobs" / "demo.toml"), *sets)
    assert done.returncode == 0, done.stderr
    return only_run(tmp_path)


def end_attempt(run: RunDir, state: str = "FAILED", *, job_id: str = "4100", restart: int = 0):
    identity = Identity(
        job_id=job_id, restart_count=restart, cluster="slurm", head_node="n1", started_s=1.0
    )
    attempt = new_attempt(run, identity, resume="auto", max_attempts=99, is_live=lambda _: False)
    verdict = Verdict(state=state, exit_code=12, driver_exit_code=1, reason="it ended", ended_s=2.0)
    write_verdict(attempt, verdict)


def save(run: RunDir, step: int) -> None:
    folder = run.checkpoints / f"step-{step}"
    folder.mkdir()
    (folder / "COMPLETE").touch()


def resume(run: RunDir, *changes: str, code: int = 0):
    sets = [word for text in changes for word in ("--set", text)]
    done = miles_hpc("resume", str(run.root), *sets)
    assert done.returncode == code, done.stderr
    return done


def texts_of(run: RunDir) -> list[bytes]:
    return [path.read_bytes() for path in (run.plan, run.handoff, run.sbatch_script, run.job)]


def test_a_failed_run_goes_on_in_its_folder_with_its_own_code(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    save(run, 1)
    (run.code / "miles_hpc" / "mark").touch()
    before = texts_of(run)[:3]
    fake_slurm.answer("sbatch", stdout="Submitted batch job 4200\n")
    done = resume(run)
    assert done.stdout.strip() == str(run.root)
    assert "continues from step-1" in done.stderr
    assert json.loads(run.job.read_text())["job_id"] == "4200"
    assert texts_of(run)[:3] == before
    assert (run.code / "miles_hpc" / "mark").exists()
    assert str(run.root) in fake_slurm.calls("sbatch")[-1]["script"]


def test_without_a_checkpoint_it_says_that_it_begins_again(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    assert "from the beginning" in resume(run).stderr


@pytest.mark.parametrize("word", ["PENDING", "RUNNING"])
def test_a_run_that_has_not_ended_is_refused(fake_slurm, tmp_path, word):
    run = submitted(tmp_path)
    fake_slurm.answer("squeue", stdout=f"{word} None\n")
    done = resume(run, code=13)
    assert "expected it to have ended" in done.stderr
    assert "miles-hpc cancel" in done.stderr


def test_every_reason_is_told_at_once_with_the_change_that_lifts_it(fake_slurm, tmp_path):
    run = submitted(tmp_path, "job.max_attempts=2", "train.num_steps=4")
    for restart in range(2):
        end_attempt(run, restart=restart)
    save(run, 4)
    before = texts_of(run)
    refused = resume(run, code=13).stderr
    assert "step 4 is done" in refused
    assert "--set train.num_steps=8" in refused
    assert "--set job.max_attempts=4" in refused
    assert texts_of(run) == before
    assert len(fake_slurm.calls("sbatch")) == 1
    resume(run, "train.num_steps=8", "job.max_attempts=4")
    assert json.loads(run.handoff.read_text())["max_attempts"] == 4
    assert json.loads(run.plan.read_text())["spec"]["train"]["num_steps"] == 8


def test_resume_never_is_kept_until_it_is_changed(fake_slurm, tmp_path):
    run = submitted(tmp_path, "job.resume=never")
    end_attempt(run)
    assert 'job.resume is "never"' in resume(run, code=13).stderr
    resume(run, "job.resume=auto", "job.max_attempts=3")
    assert "--requeue" in fake_slurm.calls("sbatch")[-1]["script"]


def test_another_topology_is_refused_with_what_would_be_legal(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    resume_freely = "parallel.pp=1"
    save(run, 1)
    before = texts_of(run)
    refused = resume(run, resume_freely, code=13).stderr
    assert "parallel.pp = 2 when it was saved, now 1" in refused
    assert "tp = 1 and pp = 2 on any multiple of 2 ranks" in refused
    assert texts_of(run) == before
    (run.checkpoints / "step-1" / "COMPLETE").unlink()
    resume(run, resume_freely)
    assert json.loads(run.plan.read_text())["layout"]["pp"] == 1


def test_changed_values_are_planned_and_their_code_frozen_anew(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    (run.code / "miles_hpc" / "mark").touch()
    resume(run, "job.time_limit=2h", "cluster.partition=long")
    script = fake_slurm.calls("sbatch")[-1]["script"]
    assert "--partition=long" in script
    assert "#SBATCH --time=120" in script or "02:00:00" in script
    assert "--partition=long" in run.sbatch_script.read_text()
    assert not (run.code / "miles_hpc" / "mark").exists()
    assert sorted(entry.name for entry in run.root.iterdir() if "code" in entry.name) == ["code"]


def test_a_bad_change_is_the_specs_error(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    before = texts_of(run)
    assert "train.num_stepz" in resume(run, "train.num_stepz=3", code=2).stderr
    resume(run, "parallel.tp=7", code=3)
    assert texts_of(run) == before


def test_a_job_that_slurm_refuses_leaves_the_folder_as_it_was(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    end_attempt(run)
    save(run, 1)
    before = texts_of(run)
    fake_slurm.answer("sbatch", stderr="sbatch: error: invalid partition\n", exit_code=1)
    fake_slurm.answer("sbatch", stderr="sbatch: error: invalid partition\n", exit_code=1)
    assert "invalid partition" in resume(run, "cluster.partition=none", code=4).stderr
    assert texts_of(run) == before
    assert (run.checkpoints / "step-1" / "COMPLETE").exists()


def test_the_secrets_are_taken_again(fake_slurm, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MY_KEY", "canary")
    root = tmp_path / "runs"
    root.mkdir()
    run = submitted(root, 'secrets.names=["MY_KEY"]')
    stored = Path(json.loads(run.handoff.read_text())["secrets"]["path"])
    stored.unlink()
    end_attempt(run)
    monkeypatch.delenv("MY_KEY")
    assert "found no MY_KEY" in resume(run, code=4).stderr
    monkeypatch.setenv("MY_KEY", "canary")
    resume(run)
    assert Path(json.loads(run.handoff.read_text())["secrets"]["path"]).is_file()


def test_a_folder_without_a_plan_is_no_run_to_resume(fake_slurm, tmp_path):
    run = submitted(tmp_path)
    os.truncate(run.plan, 0)
    assert "found no plan" in resume(run, code=13).stderr
