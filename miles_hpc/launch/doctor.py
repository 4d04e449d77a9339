"""`miles-hpc doctor`: check the nodes of a cluster by a short job whose agents only look, and say what they found.

The job asks for what a job of the spec, or of the site profile alone, would ask for, with a shorter time limit. Its run
folder goes when all nodes have reported. Knows no check: `node.checks` holds them.
"""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from miles_hpc.errors import MilesHpcError, NodeError, PreflightError
from miles_hpc.handoff import Handoff, SecretSource
from miles_hpc.launch.bundle import Cluster, node_handoff, remove_run_folder, write_doctor_folder
from miles_hpc.launch.doctor_table import doctor_table
from miles_hpc.launch.progress import INTERRUPTED_EXIT_CODE, wait_for_run
from miles_hpc.launch.queue import cancel, open_run, see_off
from miles_hpc.launch.secret_intake import forget_secrets
from miles_hpc.launch.submit import submit_run
from miles_hpc.paths import RunDir, packaged
from miles_hpc.run.node_report import DoctorReport, read_doctor_report
from miles_hpc.run.report import Status
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import LoadedSpec, load_spec
from miles_hpc.units import Seconds

_TIME_LIMIT_S = 600.0
# How long a node has to start its agent and check itself before it counts as missing.
_READY_DEADLINE_S = 90.0
# How long an agent that nobody hears may go on after the head has reported.
_END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What came of it."""

    report: DoctorReport

    @property
    def exit_code(self) -> int:
        """0 when every node is fit, else that of a job whose preflight failed."""
        return 0 if self.report.is_fit else PreflightError.exit_code

    def text(self, *, as_json: bool) -> str:
        """Return the table, or the JSON object."""
        return self.report.to_json() if as_json else doctor_table(self.report)


def load_doctor_spec(
    spec: Path | None,
    *,
    site: str | None,
    overrides: Sequence[str] | None,
    num_nodes: int | None,
    local: bool,
) -> LoadedSpec:
    """Return the spec whose nodes are checked: the user's, or an empty one that the site profile completes.

    Raises:
        SpecError: with every fault.
    """
    added = () if num_nodes is None else (f"cluster.num_nodes={num_nodes}",)
    written = tuple(overrides or ())
    if spec is None and local:
        added = (*_this_machine(written, num_nodes or 1), *added)
    loaded = load_spec(
        packaged("env") / "doctor.toml" if spec is None else spec,
        site=site,
        overrides=(*written, *added),
        local=local,
    )
    job = loaded.spec.job
    limit_s = Seconds(min(job.time_limit, _TIME_LIMIT_S))
    name = "doctor" if spec is None else f"doctor-{job.name}"[:64]
    short = job.model_copy(update={"name": name, "time_limit": limit_s, "resume": "never"})
    return dataclasses.replace(loaded, spec=loaded.spec.model_copy(update={"job": short}))


def _this_machine(overrides: tuple[str, ...], num_nodes: int) -> tuple[str, ...]:
    """Return what a spec would say of this machine's GPUs, shared by its local nodes, unless the user says it."""
    if any(entry.startswith(("cluster.device", "cluster.gpus_per_node")) for entry in overrides):
        return ()
    count = sum(1 for _ in Path("/dev").glob("nvidia[0-9]*")) // num_nodes
    if count == 0:
        return ('cluster.device="cpu"',)
    return ('cluster.device="gpu"', f"cluster.gpus_per_node={count}")


def run_doctor(loaded: LoadedSpec, cluster: Cluster, progress: TextIO) -> Examination:
    """Check the nodes and return what was found; progress goes to `progress`.

    Raises:
        SubmitError: if the job is refused, with the scheduler's words.
        NodeError: if the job ends before its head has written a report.
    """
    spec = loaded.spec
    run, handoff = write_doctor_folder(
        loaded, lambda run, secrets: doctor_handoff(spec, run, cluster, secrets)
    )
    job_id = submit_run(spec, run, handoff)
    progress.write(f"job {job_id} on {cluster}\n")
    progress.flush()
    try:
        last = wait_for_run(open_run(run.root), progress)
    except KeyboardInterrupt:
        # Nobody is left who would read it.
        cancel(run)
        remove_run_folder(run)
        sys.exit(INTERRUPTED_EXIT_CODE)
    see_off(run, _END_S)
    report = _newest_report(run)
    if report is None:
        forget_secrets(run)
        raise _no_report(run, job_id, last)
    if has_silent_nodes(report):
        forget_secrets(run)
        progress.write(f"note: not every node reported; logs are in {run.root}\n")
    else:
        remove_run_folder(run)
    return Examination(report=report)


def has_silent_nodes(report: DoctorReport) -> bool:
    """Say whether a node has written no report, so that only its log may tell why."""
    return bool(set(report.nodes) - {f.node for f in report.findings if f.check == "interpreter"})


def doctor_handoff(
    spec: JobSpec, run: RunDir, cluster: Cluster, secrets: SecretSource | None
) -> Handoff:
    """Return what the agents are told: to look. The secrets are hidden from them as from those of a job."""
    handoff = node_handoff(spec, run, cluster=cluster, secrets=secrets)
    return dataclasses.replace(
        handoff,
        doctor=True,
        max_attempts=1,
        dashboard=False,
        ready_deadline_s=min(handoff.ready_deadline_s, _READY_DEADLINE_S),
    )


def _newest_report(run: RunDir) -> DoctorReport | None:
    found = [read_doctor_report(attempt.doctor) for attempt in run.attempts()]
    return found[-1] if found else None


def _no_report(run: RunDir, job_id: str, last: Status) -> MilesHpcError:
    return NodeError(
        f"doctor: job {job_id} ended without a report: {last.state}"
        + (f": {last.reason}" if last.reason else "")
        + f"; expected its head node to report within {_TIME_LIMIT_S / 60:g} minutes. Look at {run.submission} and {run.attempts_root}."
    )
