"""The run folder as submission leaves it: spec copies, plan.json, handoff.json, frozen code and job.sbatch.

It appears whole: everything is written into a hidden sibling folder that is then renamed, so a reader never sees half of
it and a failure leaves nothing. Knows neither submitit nor any running job; the environment of the caller is not recorded.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from miles_hpc.engine.compose import page_cache_roots, save_trigger
from miles_hpc.engine.miles_command import engine_files
from miles_hpc.errors import SubmitError
from miles_hpc.handoff import Handoff, MemoryAlarm, ScratchRequest, SecretSource, Variable
from miles_hpc.launch.nccl_pin import make_nccl_pin
from miles_hpc.launch.sbatch import check_run_path, render_sbatch
from miles_hpc.launch.secret_intake import forget_secrets, taken_secrets
from miles_hpc.paths import RunDir
from miles_hpc.plan.plan import Plan
from miles_hpc.plan.sides import OBJECT_STORE_BYTES
from miles_hpc.run.resume import write_whole
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.load import LoadedSpec

Cluster = Literal["slurm", "local"]


def write_run_folder(
    loaded: LoadedSpec, plan: Plan, *, cluster: Cluster, output: Path | None = None
) -> tuple[RunDir, Handoff]:
    """Write the run folder of a job that is about to be submitted, and return it with its handoff.

    Without `output` it is RUN_ROOT/NAME-YYYYmmdd-HHMMSS, with -2, -3, ... added when that exists.

    Raises:
        SubmitError: if the folder cannot be written, or `output` exists and is not empty; nothing is left behind.
    """
    spec = loaded.spec
    try:
        with _claimed(spec, output) as (root, partial), taken_secrets(spec, root) as secrets:
            run = RunDir(root)
            handoff = make_handoff(spec, plan, run, cluster=cluster, secrets=secrets)
            _fill(RunDir(partial), loaded, handoff, script=render_sbatch(spec, run, handoff))
            write_whole(RunDir(partial).plan, plan.to_json())
            _write_engine_files(RunDir(partial), spec)
            _publish(partial, root)
    except OSError as error:
        raise _not_writable(error) from error
    return run, handoff


def write_doctor_folder(
    loaded: LoadedSpec, make: Callable[[RunDir, SecretSource | None], Handoff]
) -> tuple[RunDir, Handoff]:
    """Write a run folder that has no plan, for agents that only check their nodes, and return it with its handoff.

    Raises:
        SubmitError: if the folder cannot be written; nothing is left behind.
    """
    spec = loaded.spec
    try:
        with _claimed(spec, None) as (root, partial), taken_secrets(spec, root) as secrets:
            run = RunDir(root)
            handoff = make(run, secrets)
            _fill(RunDir(partial), loaded, handoff, script=render_sbatch(spec, run, handoff))
            _publish(partial, root)
    except OSError as error:
        raise _not_writable(error) from error
    return run, handoff


def _publish(partial: Path, root: Path) -> None:
    _sync_folder(partial)
    partial.rename(root)
    _sync_folder(root.parent)


def _not_writable(error: OSError) -> SubmitError:
    return SubmitError(
        f"run folder: {error}; expected a folder that can be written. "
        "Set job.run_root (or -o) to a writable folder on a file system that every node sees."
    )


def make_handoff(
    spec: JobSpec,
    plan: Plan,
    run: RunDir,
    *,
    cluster: Cluster,
    secrets: SecretSource | None = None,
) -> Handoff:
    """Return what the node agents of the job are told."""
    return replace(
        node_handoff(spec, run, cluster=cluster, secrets=secrets),
        ranks_per_node=plan.layout.ranks_per_node,
        environment=tuple(
            Variable(name=entry.name, value=entry.value, scope=entry.scope)
            for entry in plan.environment
        ),
        driver_argv=plan.driver_argv,
        memory_alarm=_memory_alarm(spec, plan),
    )


def node_handoff(
    spec: JobSpec, run: RunDir, *, cluster: Cluster, secrets: SecretSource | None = None
) -> Handoff:
    """Return what the node agents are told of the nodes alone, before there is a plan."""
    python = spec.cluster.python or Path(sys.executable)
    if "=" in str(python):
        raise SubmitError(
            f"python {str(python)!r}: found '='; expected a path that env(1) takes for a program. "
            "Set cluster.python to another path of the interpreter."
        )
    return Handoff(
        run_dir=str(run.root),
        code_dir=str(run.code),
        python=str(python),
        cluster=cluster,
        num_nodes=spec.cluster.num_nodes,
        ranks_per_node=1,
        gpus_per_node=spec.cluster.gpus_per_node,
        cpus_per_node=spec.cluster.cpus_per_node,
        memory_bytes=spec.cluster.memory_per_node,
        object_store_bytes=OBJECT_STORE_BYTES[spec.cluster.device],
        environment=(),
        nccl=make_nccl_pin(spec),
        scratch=ScratchRequest(
            root=None if spec.offload.scratch_root is None else str(spec.offload.scratch_root),
            min_free_bytes=spec.offload.scratch_min_free,
            allow_memory=spec.offload.allow_memory_scratch,
        ),
        interface=spec.network.interface,
        driver_argv=(),
        page_cache_roots=page_cache_roots(spec, run.root),
        resume=spec.job.resume,
        max_attempts=spec.job.max_attempts,
        ready_deadline_s=spec.agent.ready_deadline,
        stop_grace_s=spec.agent.stop_grace,
        secrets=secrets,
        dashboard=spec.agent.dashboard,
        needed_paths=needed_paths(spec),
        save_trigger=save_trigger(spec),
        time_limit_s=spec.job.time_limit,
        save_grace_s=spec.agent.save_grace,
        save_before_limit_s=spec.agent.save_before_limit,
        hang_after_s=hang_after_s(spec),
    )


def hang_after_s(spec: JobSpec) -> float:
    """Return the least silence that counts as a hang: before the native driver itself gives a phase up, and its stacks are gone."""
    native = spec.engine.native
    if native is None:
        return spec.agent.hang_after
    return min(spec.agent.hang_after, 0.9 * native.phase_deadline)


def needed_paths(spec: JobSpec) -> tuple[str, ...]:
    """Return the model and data files of the spec, which every node must see."""
    model = spec.model
    folders = (model.hf_checkpoint, model.megatron_checkpoint, model.rollout_checkpoint)
    named = (*(folders if model.weights == "checkpoint" else ()), spec.data.path)
    return tuple(dict.fromkeys(str(path) for path in named if path is not None))


def remove_run_folder(run: RunDir) -> None:
    """Remove a run folder whose job was refused, and the secrets stored for it."""
    forget_secrets(run)
    shutil.rmtree(run.root, ignore_errors=True)


def _memory_alarm(spec: JobSpec, plan: Plan) -> MemoryAlarm | None:
    limit = spec.agent.memory_alarm or plan.memory.alarm_host_bytes_per_node
    return (
        None if limit is None else MemoryAlarm(host_bytes=limit, action=spec.agent.on_memory_alarm)
    )


def _fill(partial: RunDir, loaded: LoadedSpec, handoff: Handoff, *, script: str) -> None:
    partial.spec.mkdir()
    for name, content in loaded.files.items():
        (partial.spec / name).write_bytes(content)
    freeze_code(partial.code)
    for folder in (partial.submission, partial.attempts_root, partial.cache, partial.checkpoints):
        folder.mkdir()
    write_whole(partial.handoff, handoff.to_json())
    write_whole(partial.sbatch_script, script)


def _write_engine_files(partial: RunDir, spec: JobSpec) -> None:
    files = engine_files(spec)
    if files:
        partial.engine.mkdir()
    for name, text in files.items():
        write_whole(partial.engine / name, text)


def freeze_code(target: Path) -> None:
    """Copy the package, so that a queued job does not run later edits.

    What this interpreter has compiled comes along, or every agent and probe would compile its modules anew. A copy keeps
    the times of its source, by which Python knows compiled code that is out of date.
    """
    package = Path(__file__).resolve().parent.parent
    shutil.copytree(package, target / package.name, ignore=_foreign_bytecode)


def _foreign_bytecode(folder: str, names: list[str]) -> set[str]:
    """Return which of `names` were compiled by another interpreter, or have lost their source."""
    ours = f".{sys.implementation.cache_tag}.pyc"
    sources = Path(folder).parent
    return {
        name
        for name in names
        if name.endswith((".pyc", ".pyo"))
        and not (name.endswith(ours) and (sources / f"{name.removesuffix(ours)}.py").is_file())
    }


@contextmanager
def _claimed(spec: JobSpec, output: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder's final path, taken by an empty folder, and a new sibling to fill; on an error remove all of it."""
    root = run_root(spec) if output is None else _absolute(output)
    check_run_path(root)
    parents = _make_folders(root if output is None else root.parent)
    made: list[Path] = []
    try:
        if output is None:
            root = _take_name(root, spec.job.name)
            made.append(root)
        else:
            if _refuse_unless_empty(root):
                root.mkdir()
                made.append(root)
        partial = root.with_name(f".{root.name}.partial-{os.getpid()}")
        partial.mkdir()
        made.append(partial)
        yield root, partial
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # somebody else has put something there meanwhile
            for folder in reversed(parents):
                folder.rmdir()
        raise


def run_root(spec: JobSpec) -> Path:
    """Return the absolute folder in which run folders are made."""
    return _absolute(spec.job.run_root)


def _absolute(path: Path) -> Path:
    try:
        # Not resolve(): the name that the user gave may be the one that every node has.
        return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100
    except RuntimeError as error:
        raise SubmitError(
            f"{path}: {error}; expected a path that exists for this user. Write the path out."
        ) from error


def _take_name(root: Path, name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        path = root / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        return path


def _refuse_unless_empty(root: Path) -> bool:
    """Return whether `root` has still to be made."""
    if not root.exists():
        return True
    if not root.is_dir() or any(root.iterdir()):
        raise SubmitError(
            f"run folder {root}: it exists and is not an empty folder; expected a new one, so that two runs never mix. "
            "Choose another -o, or remove it."
        )
    return False


def _make_folders(path: Path) -> list[Path]:
    """Make `path` and what is missing above it; return what was made, outermost first."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
    except OSError:
        for folder in reversed(made):
            folder.rmdir()
        raise
    return made


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
