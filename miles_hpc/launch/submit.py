"""Hand a written run folder to submitit: sbatch on Slurm, a controller process of its own session on one machine.

The only module that imports submitit. Its payload is `os.execv` of the node command and nothing else, so what runs is what
`job.sbatch` runs; submitit's signal handler, requeue and result pickles are never used. Knows no state of a running job.

`python -m miles_hpc.launch.submit RUN_DIR TIME_LIMIT_S` is the child that starts a local controller.
"""

import contextlib
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from miles_hpc.errors import MilesHpcError, SubmitError
from miles_hpc.handoff import Handoff, is_shell_setting, node_argv, read_handoff
from miles_hpc.launch.bundle import remove_run_folder
from miles_hpc.launch.queue import process_start_ticks
from miles_hpc.launch.sbatch import sbatch_options, srun_arguments
from miles_hpc.paths import RunDir
from miles_hpc.process import run_short
from miles_hpc.run.resume import read_object, write_whole
from miles_hpc.spec.job import JobSpec

_LOCAL_START_TIMEOUT_S = 60.0
_KEPT_SLURM_NAMES = frozenset(
    {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT"}
)
# Site defaults that a spec without the key may rely on; every other SBATCH_ variable would override the spec.
_SITE_DEFAULTS = ("account", "clusters", "constraint", "partition", "qos", "reservation", "wckey")
_FROZEN_FOR_SUBMITIT = ("submitit", "cloudpickle", "typing_extensions")


def submit_run(
    spec: JobSpec,
    run: RunDir,
    handoff: Handoff,
    *,
    on_refusal: Callable[[RunDir], None] = remove_run_folder,
) -> str:
    """Submit the job of `run` where its handoff says and return the job id; a refused job leaves no run folder.

    A folder that holds more than the refused job has an `on_refusal` of its own.

    Raises:
        SubmitError: if there is no such cluster here, or it refuses the job.
    """
    if handoff.cluster == "local":
        return submit_local(spec, run, handoff, on_refusal=on_refusal)
    return submit_slurm(spec, run, handoff, on_refusal=on_refusal)


def submit_slurm(
    spec: JobSpec,
    run: RunDir,
    handoff: Handoff,
    *,
    on_refusal: Callable[[RunDir], None] = remove_run_folder,
) -> str:
    """Submit the job of `run` to Slurm through submitit, write job.json and return the job id.

    Raises:
        SubmitError: if there is no Slurm on PATH or it refuses the job, with its own words.
    """
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        on_refusal(run)
        raise SubmitError(
            f"submit: found no {' and no '.join(missing)} on PATH; expected Slurm's client commands. "
            "Run it on this machine (--cluster local), write the folder for plain sbatch (miles-hpc render SPEC -o DIR), "
            "or log in to the cluster's login node."
        )
    submitit = _import_submitit()
    options = sbatch_options(spec, run)
    executor = submitit.SlurmExecutor(folder=run.submission, python=_node_python(run, handoff))
    executor.update_parameters(
        nodes=spec.cluster.num_nodes,
        ntasks_per_node=1,
        time=-int(-spec.job.time_limit // 60),
        stderr_to_stdout=True,
        srun_args=list(srun_arguments(spec)),
        additional_parameters={
            # submitit spells its own parameters with underscores; the same key replaces one, another would repeat it.
            **{
                name if name == "open-mode" else name.replace("-", "_"): value
                for name, value in options.items()
            },
            # submitit always asks for a signal. Zero seconds before the end is never, and SIGCONT would do nothing.
            "signal": "CONT@0",
        },
    )
    started_s = time.time()
    with (
        _environ_for_sbatch(options, secret_names(handoff)),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            job = executor.submit(os.execv, "/usr/bin/env", list(node_argv(handoff)))
        except submitit.core.utils.FailedJobError as error:
            on_refusal(run)
            raise _refused(error) from error
        except submitit.core.utils.FailedSubmissionError as error:
            # sbatch said yes, so there may be a job that needs this folder.
            raise SubmitError(
                f"submit: {error}; expected sbatch to print a job id. Look whether the job is queued (squeue) before trying "
                f"again; its run folder is {run.root}."
            ) from error
    job_id = str(job.job_id)
    _write_job(run, {"job_id": job_id, "cluster": "slurm", "submitted_s": started_s})
    return job_id


def submit_local(
    spec: JobSpec,
    run: RunDir,
    handoff: Handoff,
    *,
    on_refusal: Callable[[RunDir], None] = remove_run_folder,
) -> str:
    """Start the job of `run` on this machine, write job.json and return the controller's process id.

    A short child in a session of its own starts the controller, which so survives this terminal and its Ctrl-C.

    Raises:
        SubmitError: if the controller could not be started.
    """
    path = os.pathsep.join(filter(None, (handoff.code_dir, os.environ.get("PYTHONPATH"))))
    done = run_short(
        (
            sys.executable,
            "-P",
            "-m",
            "miles_hpc.launch.submit",
            str(run.root),
            f"{spec.job.time_limit:.0f}",
        ),
        timeout_s=_LOCAL_START_TIMEOUT_S,
        environ={
            **without_submitters(os.environ, secret_names(handoff)),
            "PYTHONPATH": path,
            "SUBMITIT_LOG_LEVEL": "NOCONFIG",
        },
    )
    job = read_object(run.job)
    if done.exit_code == SubmitError.exit_code:
        on_refusal(run)
        raise SubmitError(done.stderr.strip())
    if not done.ok or job is None:
        on_refusal(run)
        raise SubmitError(
            f"submit: {done.describe()}; expected submitit's local controller to start. "
            f"Install the package with its dependencies for {sys.executable}."
        )
    return str(job["job_id"])


def _start_local(run: RunDir, time_limit_s: float) -> None:
    """Start submitit's controller from a fresh session and write job.json."""
    handoff = read_handoff(run.handoff)
    os.setsid()
    os.chdir(run.root)
    started_s = time.time()
    with _output_to(run.submission / "controller.log"):
        executor = _import_submitit().LocalExecutor(folder=run.submission)
        executor.update_parameters(
            nodes=1,
            tasks_per_node=handoff.num_nodes,
            gpus_per_node=handoff.gpus_per_node * handoff.num_nodes,
            # Then the controller sends SIGINT and, a second later, SIGKILL; the agents clean up after both.
            timeout_min=time_limit_s / 60,
            signal_delay_s=0,
            stderr_to_stdout=True,
        )
        job = executor.submit(os.execv, "/usr/bin/env", list(node_argv(handoff)))
    _write_job(
        run,
        {
            "job_id": str(job.job_id),
            "cluster": "local",
            "submitted_s": started_s,
            "time_limit_s": time_limit_s,
            "host": socket.gethostname(),
            "start_ticks": process_start_ticks(int(job.job_id)),
        },
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Give the processes started inside `path` as their output instead of the pipes of the command line."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    saved = os.dup(1), os.dup(2)  # os.dup marks them close-on-exec
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    try:
        yield
    finally:
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _import_submitit() -> ModuleType:
    # submitit configures logging to our stdout and stderr at import unless told not to.
    os.environ["SUBMITIT_LOG_LEVEL"] = "NOCONFIG"
    try:
        import submitit
    except ImportError as error:
        raise SubmitError(
            f"submit: {error}; expected submitit for {sys.executable}. Install it, or write the folder for plain sbatch "
            "(miles-hpc render SPEC -o DIR)."
        ) from error
    module: ModuleType = submitit
    return module


def _node_python(run: RunDir, handoff: Handoff) -> str:
    """Return the shell words that start Python for submitit's task on a node.

    The node's interpreter, which may be a container's, need not have submitit: what the task imports is frozen beside it.
    """
    folder = run.submission / "python"
    for name in _FROZEN_FOR_SUBMITIT:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            continue
        if spec.submodule_search_locations:
            source = Path(spec.origin).parent
            ignored = shutil.ignore_patterns("__pycache__", "*.py[co]", "test_*")
            shutil.copytree(source, folder / name, ignore=ignored, dirs_exist_ok=True)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.origin, folder)
    return shlex.join(
        (
            "/usr/bin/env",
            f"PYTHONPATH={folder}",
            "SUBMITIT_LOG_LEVEL=NOCONFIG",
            handoff.python,
            "-P",
        )
    )


@contextlib.contextmanager
def _environ_for_sbatch(
    options: Mapping[str, object], secret_names: tuple[str, ...]
) -> Iterator[None]:
    """Hide the variables of an enclosing allocation and of the user's shell that would change the job."""
    kept_defaults = {f"SBATCH_{name.upper()}" for name in _SITE_DEFAULTS if name not in options}
    kept = without_submitters(os.environ, secret_names)
    hidden = {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(("SLURM_", "SLURMD_", "SRUN_")) and name not in _KEPT_SLURM_NAMES)
        or (name.startswith("SBATCH_") and name not in kept_defaults)
        or (name.startswith("SUBMITIT_") and name != "SUBMITIT_LOG_LEVEL")
        or name not in kept
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def secret_names(handoff: Handoff) -> tuple[str, ...]:
    """Return the variables that only the driver may have."""
    return () if handoff.secrets is None else handoff.secrets.names


def without_submitters(environ: Mapping[str, str], secret_names: tuple[str, ...]) -> dict[str, str]:
    """Return `environ` without what belongs to the submitting shell alone: secrets, Python and conda settings, proxies."""
    return {
        name: value
        for name, value in environ.items()
        if name not in secret_names and not is_shell_setting(name)
    }


def _refused(error: Exception) -> SubmitError:
    cause = error.__cause__
    if not isinstance(cause, subprocess.CalledProcessError):
        return SubmitError(f"submit: sbatch: {error}; expected it to run. Try `sbatch --version`.")
    argv = cause.cmd if isinstance(cause.cmd, list) else [str(cause.cmd)]
    said = " | ".join(str(cause.stderr).strip().splitlines()) or "(no error text)"
    return SubmitError(
        f"submit: `{shlex.join(argv)}`: exit code {cause.returncode}: {said}; expected Slurm to accept the job. "
        "Correct [cluster] in the spec or the site profile; nothing was left behind."
    )


def _write_job(run: RunDir, job: Mapping[str, object]) -> None:
    write_whole(run.job, json.dumps(job, indent=2, sort_keys=True) + "\n")


def _main(argv: list[str]) -> NoReturn:
    try:
        _start_local(RunDir(Path(argv[1])), float(argv[2]))
    except MilesHpcError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    _main(sys.argv)
