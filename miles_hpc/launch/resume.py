"""`resume`: a further job for a run folder whose last one has ended, refused before anything is queued where it could not go on.

Without changes the folder's own plan, handoff and frozen code run again. With `--set` the spec of the plan is changed and
planned anew, and the code is frozen anew with it, since a handoff belongs to the code that reads it; the checkpoints stay.
Knows no checkpoint format: what a state is tied to is `plan.resumable`.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from miles_hpc import __version__
from miles_hpc.engine.compose import draft_plan, require_drivable, require_plan
from miles_hpc.errors import ResumeError
from miles_hpc.handoff import read_handoff
from miles_hpc.launch.bundle import freeze_code, make_handoff
from miles_hpc.launch.queue import status
from miles_hpc.launch.sbatch import render_sbatch
from miles_hpc.launch.secret_intake import forget_secrets, taken_secrets
from miles_hpc.launch.submit import submit_run
from miles_hpc.paths import RunDir
from miles_hpc.plan.plan import VERSION, Plan
from miles_hpc.plan.resumable import broken_ties, legal_change
from miles_hpc.run.report import Status
from miles_hpc.run.resume import latest_checkpoint, read_object, spent_attempts, write_whole
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import load_planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The job that goes on with a run.

    Attributes:
        checkpoint: name of the checkpoint that it continues from; None when it starts from the beginning.
    """

    job_id: str
    cluster: str
    checkpoint: str | None


def resume_run(run: RunDir, overrides: Sequence[str] = ()) -> Resumed:
    """Submit a further job for `run`, with the keys of `overrides` changed.

    Raises:
        ResumeError: naming every reason why the run cannot go on as asked; nothing was changed then.
        SpecError, PlanError: if the changed spec is wrong or does not fit.
        SubmitError: if the scheduler refuses the job; the folder is as it was.
    """
    raw = _read_plan(run)
    saved = load_planned(_spec_of(raw), str(run.plan))
    spec = load_planned(_spec_of(raw), str(run.plan), overrides) if overrides else saved
    _refuse(run, status(run), saved, spec)
    before = {path: path.read_bytes() for path in (run.plan, run.handoff, run.sbatch_script)}
    handoff = read_handoff(run.handoff)
    with taken_secrets(spec, run.root) as secrets:
        try:
            if overrides:
                plan = _plan_again(spec, raw, overrides)
                cluster = handoff.cluster
                handoff = make_handoff(spec, plan, run, cluster=cluster, secrets=secrets)
                _replace_code(run)
                write_whole(run.plan, plan.to_json())
            else:
                handoff = replace(handoff, secrets=secrets)
            write_whole(run.handoff, handoff.to_json())
            write_whole(run.sbatch_script, render_sbatch(spec, run, handoff))
            job_id = submit_run(spec, run, handoff, on_refusal=forget_secrets)
        except BaseException:
            for path, content in before.items():
                path.write_bytes(content)
            raise
    newest = latest_checkpoint(run)
    name = None if newest is None else newest.name
    return Resumed(job_id=job_id, cluster=handoff.cluster, checkpoint=name)


def _read_plan(run: RunDir) -> dict[str, object]:
    raw = read_object(run.plan)
    if raw is None or raw.get("version") != VERSION or not isinstance(raw.get("spec"), dict):
        raise ResumeError(
            f"{run.plan}: found no plan of version {VERSION}; expected the one that submit or render wrote. "
            "A folder of doctor, or of another version of this package, cannot be resumed: submit the spec again."
        )
    return raw


def _spec_of(raw: dict[str, object]) -> dict[str, object]:
    spec = raw["spec"]
    return dict(spec) if isinstance(spec, dict) else {}


def _refuse(run: RunDir, now: Status, saved: JobSpec, spec: JobSpec) -> None:
    """Raise ResumeError with every reason against a further job."""
    reasons = []
    if now.job_id is not None and not now.is_final:
        reasons.append(
            f"job {now.job_id} is {now.state} ({now.reason}); expected it to have ended. "
            f"Wait for it, or end it: miles-hpc cancel {run.root}"
        )
    newest = latest_checkpoint(run)
    done = 0 if newest is None else int(newest.name.rpartition("-")[2])
    if done >= spec.train.num_steps:
        reasons.append(
            f"step {done} is done; expected fewer than train.num_steps = {spec.train.num_steps}. "
            f"For more steps: --set train.num_steps={done + spec.train.num_steps}"
        )
    attempts = tuple(run.attempts())
    if attempts and spec.job.resume == "never":
        reasons.append(
            f'attempt {attempts[-1].number} is there; expected none, since job.resume is "never". '
            "To go on all the same: --set job.resume=auto"
        )
    spent = spent_attempts(attempts)
    if spent >= spec.job.max_attempts:
        reasons.append(
            f"{spent} attempts have ended without success; expected fewer than job.max_attempts = {spec.job.max_attempts}. "
            f"For further ones: --set job.max_attempts={spent + saved.job.max_attempts}"
        )
    ties = broken_ties(saved, spec) if newest is not None else ()
    if ties:
        reasons.append(
            f"{'; '.join(ties)}; expected what the state of {newest and newest.name} is tied to: {legal_change(saved)}. "
            "Keep those values, or submit a new run"
        )
    if reasons:
        raise ResumeError("\n".join(f"{run.root}: {reason}." for reason in reasons))


def _plan_again(spec: JobSpec, raw: dict[str, object], overrides: Sequence[str]) -> Plan:
    earlier, hashes = raw.get("overrides"), raw.get("hashes")
    draft = draft_plan(
        spec,
        python=sys.executable,
        package_version=__version__,
        overrides=(*(earlier if isinstance(earlier, list) else ()), *overrides),
        hashes=hashes if isinstance(hashes, dict) else {},
    )
    plan = require_plan(draft)
    require_drivable(plan)
    return plan


def _replace_code(run: RunDir) -> None:
    """Freeze the package anew; no job runs the old copy any more."""
    fresh, old = (run.code.with_name(f".code.{what}") for what in ("new", "old"))
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    freeze_code(fresh)
    run.code.rename(old)
    fresh.rename(run.code)
    shutil.rmtree(old, ignore_errors=True)
