"""The sbatch options and the one srun step of a job, and the plain script made of both.

Pure: nothing is read, written or run. `launch.submit` gives the same options to submitit, so both ways of submitting ask
Slurm for the same job. The script has `#SBATCH` lines and one `srun`; every decision is the node agent's or was made here.
"""

import math
import re
import shlex
from pathlib import Path
from typing import Literal

from miles_hpc.errors import SpecError, SubmitError
from miles_hpc.handoff import Handoff, node_argv
from miles_hpc.paths import RunDir
from miles_hpc.spec.job import ClusterTable, JobSpec
from miles_hpc.units import format_slurm_time

OWNED_OPTIONS = frozenset(
    {
        "account", "array", "batch", "chdir", "comment", "constraint", "cpus-per-task", "error", "exclusive", "export",
        "export-file", "gpus", "gpus-per-node", "gpus-per-task", "gres", "input", "job-name", "mem", "mem-per-cpu",
        "mem-per-gpu", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition",
        "qos", "requeue", "reservation", "segment", "signal", "test-only", "time", "wait", "wrap",
    }
)  # fmt: skip
"""Long options of sbatch that `cluster.sbatch_options` may not set: this package sets them, or the job would not be one."""

OptionValue = str | Literal[True]
"""Value of one long option; True is an option without value."""

_OPTION_NAME = re.compile(r"[a-z][a-z0-9-]*")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f]")
# Slurm replaces %x in output paths and drops a backslash; a colon ends an entry of PYTHONPATH.
_UNSAFE_IN_PATH = re.compile(r"[\x00-\x1f\x7f%\\:]")
_MIN_STRAGGLER_S = 60


def sbatch_options(spec: JobSpec, run: RunDir) -> dict[str, OptionValue]:
    """Return sbatch's long options by name without dashes, in the order of the script.

    Raises:
        SpecError: if `cluster.sbatch_options` names an option that this package owns, or a value cannot stand on a line.
        SubmitError: if the run folder's path cannot be written in a script.
    """
    check_run_path(run.root)
    cluster = spec.cluster
    options: dict[str, OptionValue | None] = {
        "job-name": spec.job.name,
        "comment": spec.job.comment,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "reservation": cluster.reservation,
        "constraint": cluster.constraint,
        "nodes": str(cluster.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": None if cluster.cpus_per_node is None else str(cluster.cpus_per_node),
        "mem": _memory(cluster),
        **_gpus(cluster),
        "exclusive": True if cluster.exclusive else None,
        "segment": None if cluster.segment is None else str(cluster.segment),
        "time": format_slurm_time(spec.job.time_limit),
        # A cluster's JobRequeue=1 must not run a job again that may not continue.
        "requeue" if spec.job.resume == "auto" else "no-requeue": True,
        # Requeue keeps the job id: without append it would truncate the first attempt's output.
        "open-mode": "append",
        # Where it was submitted need not exist on a node.
        "chdir": str(run.root),
        "output": str(run.submission / "%j_0_log.out"),
    }
    for name, value in cluster.sbatch_options.items():
        _check_option(name)
        options[name] = value if isinstance(value, str) else (value or None)
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        _check_value(f"--{name}", value)
    return chosen


def srun_arguments(spec: JobSpec) -> tuple[str, ...]:
    """Return the arguments of the srun step, the same for both ways of submitting.

    Everything that srun would otherwise take from a SLURM_ variable is said, since the variables of an enclosing
    allocation, or of `sbatch --export=NONE`, are inherited too.
    """
    cluster = spec.cluster
    cpus = (
        () if cluster.cpus_per_node is None else (f"--cpus-per-task={cluster.cpus_per_node}",)
    )  # Slurm 22.05 to 23.02: srun no longer takes it from sbatch.
    straggler_s = _MIN_STRAGGLER_S + math.ceil(2 * spec.agent.stop_grace)
    for argument in cluster.srun_options:
        _check_value("cluster.srun_options", argument)
    return (
        f"--nodes={cluster.num_nodes}",
        f"--ntasks={cluster.num_nodes}",
        "--ntasks-per-node=1",
        *cpus,
        f"--mem={_memory(cluster)}",
        "--cpu-bind=none",
        "--export=ALL",
        "--open-mode=append",
        # An agent that ends is no reason for srun to kill the others: the head decides, and all clean up. But none may
        # hold the allocation long after the first has gone.
        "--kill-on-bad-exit=0",
        f"--wait={straggler_s}",
        *cluster.srun_options,
    )


def render_sbatch(spec: JobSpec, run: RunDir, handoff: Handoff) -> str:
    """Return the script that plain `sbatch` submits, as often as wanted."""
    lines = ["#!/bin/bash"]
    lines += [format_option(name, value) for name, value in sbatch_options(spec, run).items()]
    step = (
        "srun",
        "--unbuffered",
        f"--output={run.submission / '%j_%t_log.out'}",
        *srun_arguments(spec),
        *node_argv(handoff),
    )
    return "\n".join([*lines, "", shlex.join(step), ""])


def format_option(name: str, value: OptionValue) -> str:
    """Return one `#SBATCH` line; sbatch undoes shell quotes on it."""
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def check_run_path(path: Path) -> None:
    """Refuse a run folder that Slurm, PYTHONPATH or a script line would take for another.

    Raises:
        SubmitError: naming the character.
    """
    bad = _UNSAFE_IN_PATH.search(str(path))
    if bad is not None:
        raise SubmitError(
            f"run folder {str(path)!r}: found the character {bad[0]!r}; expected a path without control characters, "
            "'%', ':' and backslash, which Slurm and PYTHONPATH read as something else. Choose another job.run_root or -o."
        )


def _memory(cluster: ClusterTable) -> str:
    if cluster.memory_per_node is None:
        return "0"
    return f"{math.ceil(cluster.memory_per_node / 2**20)}M"


def _gpus(cluster: ClusterTable) -> dict[str, str | None]:
    if not cluster.gpus_per_node or cluster.gpu_request == "none":
        return {}
    kind = "" if cluster.gpu_type is None else f"{cluster.gpu_type}:"
    if cluster.gpu_request == "gres":
        return {"gres": f"gpu:{kind}{cluster.gpus_per_node}"}
    return {"gpus-per-node": f"{kind}{cluster.gpus_per_node}"}


def _check_option(name: str) -> None:
    if _OPTION_NAME.fullmatch(name) is None:
        raise SpecError(
            f'cluster.sbatch_options: found {name!r}; expected a long option of sbatch without dashes, such as "licenses".'
        )
    if name in OWNED_OPTIONS:
        raise SpecError(
            f"cluster.sbatch_options: found {name!r}, which this package sets from the spec or must not be set. "
            "Remove it; docs/reference/job-spec.md names the key that stands for it."
        )


def _check_value(where: str, value: OptionValue) -> None:
    if isinstance(value, str) and _UNSAFE.search(value):
        raise SpecError(
            f"{where}: found {value!r}; expected text without line breaks and control characters, since it stands on one "
            "line of the job script. Remove them."
        )
