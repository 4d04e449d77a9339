"""The exception tree and its exit codes.

    MilesHpcError            [1]   base; the CLI prints `error: ...` without a traceback
      SpecError              [2]   the TOML is wrong: file:line, key path, value, rule, nearest valid key
      PlanError              [3]   the spec cannot run on this cluster: the arithmetic, and what would fit
      SubmitError            [4]   sbatch or submitit refused, or the run folder cannot be written
      QueueError             [5]   the scheduler could not be asked, or the run or job is unknown to it
      PreflightError         [10]  a node is not fit: node, check, expected, found, fix
      NodeError              [11]  Ray or NCCL did not come up in time: who was missing
      DriverError            [12]  the driver died: its exit code or signal, and the path of its log
      ResumeError            [13]  the run folder cannot be resumed or is in use: what is missing or who holds it
      TimeLimitError         [14]  job.time_limit ended the attempt and no further one follows: why, and what was saved

A message has four parts: where - what was found - what was expected - what to do. This module knows no other module.
"""

from dataclasses import dataclass


class MilesHpcError(Exception):
    """Base of every error a user may see; `exit_code` is what the process returns."""

    exit_code = 1


class SpecError(MilesHpcError):
    """The job spec is wrong; `str()` lists every fault, one a line."""

    exit_code = 2


class PlanError(MilesHpcError):
    """The spec is well-formed but cannot run on the cluster it names."""

    exit_code = 3


class SubmitError(MilesHpcError):
    """The scheduler refused the job or the run folder could not be written."""

    exit_code = 4


class QueueError(MilesHpcError):
    """The scheduler could not be asked about a job, or there is no such run."""

    exit_code = 5


class PreflightError(MilesHpcError):
    """A node is not fit to run the job; raised before anything was started on it."""

    exit_code = 10


class NodeError(MilesHpcError):
    """The nodes of the job did not become one Ray cluster in time."""

    exit_code = 11


class DriverError(MilesHpcError):
    """The driver ended with a non-zero exit code or by a signal."""

    exit_code = 12


class ResumeError(MilesHpcError):
    """The run folder cannot be continued, or another live job is using it."""

    exit_code = 13


class TimeLimitError(MilesHpcError):
    """The time limit ended the attempt, and the job does not go on by itself."""

    exit_code = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, with the four parts every message has.

    Attributes:
        where: file:line and key path, or node and check.
        found: the offending value as the user wrote it.
        expected: the rule, with its arithmetic.
        fix: what to do.
    """

    where: str
    found: str
    expected: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: found {self.found}; expected {self.expected}. {self.fix}"
