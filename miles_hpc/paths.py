"""The name of every file in a run folder, and where the packaged env/ and jobs/ are.

Knows names only: it neither reads nor writes what stands in the files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """`attempts/N`: one execution of the run."""

    root: Path

    @property
    def number(self) -> int:
        """Attempt number, from 1."""
        return int(self.root.name)

    @property
    def identity(self) -> Path:
        """attempt.json: {job_id, restart_count, cluster, head_node, started_s}; there before the folder gets its name."""
        return self.root / "attempt.json"

    @property
    def resolved(self) -> Path:
        """resolved.json: what really ran (placeholders filled, nodes, NCCL digest, versions)."""
        return self.root / "resolved.json"

    @property
    def verdict(self) -> Path:
        """verdict.json: the head's last word; its schema is `run.resume.Verdict`."""
        return self.root / "verdict.json"

    @property
    def doctor(self) -> Path:
        """doctor.json: what `miles-hpc doctor` found on all nodes; its schema is `run.node_report.DoctorReport`."""
        return self.root / "doctor.json"

    @property
    def driver_log(self) -> Path:
        """driver.log: stdout and stderr of the driver."""
        return self.root / "driver.log"

    @property
    def rendezvous(self) -> Path:
        """rendezvous/: small files by which the nodes of one attempt find each other."""
        return self.root / "rendezvous"

    @property
    def save_request(self) -> Path:
        """requests/save_and_stop.json: the driver shall save and stop; its schema is `run.save_request.SaveRequest`."""
        return self.root / "requests" / "save_and_stop.json"

    def node_log(self, node: str) -> Path:
        """NODE.log: the agent's own log and what its Ray processes print."""
        return self.root / f"{node}.log"

    def node_events(self, node: str) -> Path:
        """events-NODE.jsonl: events that this node saw."""
        return self.root / f"events-{node}.jsonl"

    def node_samples(self, node: str) -> Path:
        """samples-NODE.jsonl: memory of the job on this node over time; its schema is `run.samples`."""
        return self.root / f"samples-{node}.jsonl"

    def stacks(self, node: str) -> Path:
        """stacks/NODE.txt: where the job's processes on this node stood when the driver hung."""
        return self.root / "stacks" / f"{node}.txt"

    def ray_logs(self, node: str) -> Path:
        """ray-NODE/: Ray's log files, copied from the node at teardown."""
        return self.root / f"ray-{node}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """A run folder: one experiment on disk."""

    root: Path

    @property
    def spec(self) -> Path:
        """spec/: byte copies of the job's TOML, of what it extends and of the site profile."""
        return self.root / "spec"

    @property
    def plan(self) -> Path:
        """plan.json: the truth at submission."""
        return self.root / "plan.json"

    @property
    def handoff(self) -> Path:
        """handoff.json: what a compute node needs; its schema is `handoff.Handoff`."""
        return self.root / "handoff.json"

    @property
    def sbatch_script(self) -> Path:
        """job.sbatch: the plain fallback script."""
        return self.root / "job.sbatch"

    @property
    def job(self) -> Path:
        """job.json: {job_id, cluster, submitted_s}; absent after `render`."""
        return self.root / "job.json"

    @property
    def code(self) -> Path:
        """code/: the package as it was at submission."""
        return self.root / "code"

    @property
    def engine(self) -> Path:
        """engine/: files that the driver's command names, such as what each rollout engine serves."""
        return self.root / "engine"

    @property
    def submission(self) -> Path:
        """submission/: submitit's folder and Slurm's own output files."""
        return self.root / "submission"

    @property
    def events(self) -> Path:
        """events.jsonl: all events of all attempts, merged by the head."""
        return self.root / "events.jsonl"

    @property
    def cache(self) -> Path:
        """cache/: what a run makes once and reads again, such as a dequantised model."""
        return self.root / "cache"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: `step-N/` folders, complete when they hold a COMPLETE file."""
        return self.root / "checkpoints"

    @property
    def attempts_root(self) -> Path:
        """attempts/: one folder per attempt."""
        return self.root / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        """Return attempt `number` (from 1), whether it exists or not."""
        return AttemptDir(self.attempts_root / str(number))

    def attempts(self) -> Iterator[AttemptDir]:
        """Yield the attempts that exist, oldest first."""
        numbers = sorted(
            int(entry.name) for entry in self.attempts_root.glob("*") if entry.name.isdigit()
        )
        for number in numbers:
            yield self.attempt(number)


def packaged(folder: str) -> Path:
    """Return the folder `env` or `jobs`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    inside = package / "data" / folder
    return inside if inside.is_dir() else package.parent / folder
