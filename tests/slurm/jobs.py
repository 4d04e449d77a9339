"""Run folders with a stub driver, for tests of the node command alone: no spec, no plan, no trainer.

`write_run` writes handoff.json as the login node would; `submit` sends one srun step of node agents to the rig.
"""

import json
import os
import shlex
import shutil
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

from miles_hpc.handoff import (
    Handoff,
    NcclPin,
    ScratchRequest,
    Variable,
    node_argv,
    read_handoff,
)
from miles_hpc.paths import AttemptDir, RunDir
from miles_hpc.run.events import read_events
from miles_hpc.run.resume import Verdict, read_verdict

REPOSITORY = Path(__file__).resolve().parents[2]
COMMA_VALUE = "garbage_collection_threshold:0.8,max_split_size_mb:512"


def write_run(root: Path, driver: str, *, num_nodes: int, **changes) -> RunDir:
    """Write a run folder whose driver is the Python source `driver`; `changes` replace fields of the handoff."""
    root.mkdir(parents=True)
    (root / "submission").mkdir()
    script = root / "driver.py"
    script.write_text(textwrap.dedent(driver))
    handoff = Handoff(
        run_dir=str(root),
        code_dir=str(REPOSITORY),
        python=sys.executable,
        cluster="slurm",
        num_nodes=num_nodes,
        ranks_per_node=1,
        gpus_per_node=0,
        cpus_per_node=2,
        memory_bytes=None,
        object_store_bytes=80 << 20,
        environment=(Variable(name="PYTORCH_CUDA_ALLOC_CONF", value=COMMA_VALUE),),
        nccl=NcclPin(path=None, version_code=23007, preload=True),
        scratch=ScratchRequest(root=None, min_free_bytes=1 << 20, allow_memory=False),
        interface=None,
        driver_argv=(sys.executable, str(script), "{attempt_dir}"),
        page_cache_roots=(),
        resume="auto",
        max_attempts=5,
        ready_deadline_s=90.0,
        stop_grace_s=3.0,
    )
    run = RunDir(root)
    run.handoff.write_text(replace(handoff, **changes).to_json())
    return run


def write_variant(run: RunDir, root: Path, **changes) -> RunDir:
    """Write a folder that shares everything with `run` but the handoff, for the one node that differs."""
    root.mkdir()
    for name in ("attempts", "submission"):
        (run.root / name).mkdir(exist_ok=True)
        (root / name).symlink_to(run.root / name)
    handoff = replace(handoff_of(run), **changes)
    variant = RunDir(root)
    variant.handoff.write_text(handoff.to_json())
    return variant


def handoff_of(run: RunDir) -> Handoff:
    """Return the handoff as it stands in the run folder."""
    return read_handoff(run.handoff)


def submit(
    slurm,
    run: RunDir,
    *,
    on_node: dict[str, str] | None = None,
    started: Path | None = None,
    options: str = "",
    **environ: str,
) -> str:
    """Submit one agent a node and return the job id.

    `on_node` replaces the command of single nodes; `options` are further ones of sbatch; the batch script writes the time of its first line to `started`.
    """
    handoff = handoff_of(run)
    cases = "".join(f"  {node}) exec {command} ;;\n" for node, command in (on_node or {}).items())
    task = run.root / "task.sh"
    task.write_text(
        f"case $SLURMD_NODENAME in\n{cases}  *) exec {shlex.join(node_argv(handoff))} ;;\nesac\n"
    )
    script = run.root / "job.sbatch"
    batch_output = shlex.quote(f"--output={run.submission}/%j_0_log.out")
    output = shlex.quote(f"--output={run.submission}/%j_%t_log.out")
    clock = f"date +%s.%N > {shlex.quote(str(started))}\n" if started else ""
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes={handoff.num_nodes} --ntasks-per-node=1 --cpus-per-task=1 --mem=500 "
        f"{options}\n"
        f"#SBATCH --open-mode=append {batch_output}\n{clock}"
        f"exec srun --kill-on-bad-exit=0 --unbuffered --open-mode=append {output} "
        f"bash {shlex.quote(str(task))}\n"
    )
    done = slurm.run("sbatch", "--parsable", str(script), environ={**slurm.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def attempt_of(run: RunDir, number: int = 1) -> AttemptDir:
    """Return an attempt that must exist."""
    attempt = run.attempt(number)
    assert attempt.root.is_dir(), outputs(run)
    return attempt


def verdict_of(run: RunDir, number: int = 1) -> Verdict:
    """Return the verdict of an attempt that must have one."""
    verdict = read_verdict(attempt_of(run, number))
    assert verdict is not None, outputs(run)
    return verdict


def events_of(run: RunDir) -> list[dict]:
    """Return the merged events."""
    return list(read_events(run.events))


def outputs(run: RunDir) -> str:
    """Return everything the job printed, for the message of a failed assertion."""
    paths = [*run.submission.glob("*_log.out"), *run.root.glob("attempts/*/*.log")]
    return "\n".join(f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


def wait_for(look, what: str, run: RunDir, timeout_s: float = 60.0):
    """Return the first true value of `look`."""
    end_s = time.monotonic() + timeout_s
    while True:
        value = look()
        if value:
            return value
        assert time.monotonic() < end_s, f"no {what} after {timeout_s:g} s\n{outputs(run)}"
        time.sleep(0.05)


def processes_of(run: RunDir) -> dict[int, str]:
    """Return the living processes that carry this run's folder in command or environment."""
    marks = (str(run.root).encode(),)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            text = command + (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and any(mark in text for mark in marks):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")[:160]
    return found


def folders_of(run: RunDir) -> tuple[Path, ...]:
    """Return the folders that the agents of this run made outside the run folder and that still exist."""
    paths = [
        Path(str(event[name]))
        for event in events_of(run)
        if event["kind"] == "scratch"
        for name in ("path", "ray_temp")
        if name in event
    ]
    assert paths, events_of(run)
    return tuple(path for path in paths if path.exists())


def assert_nothing_left(run: RunDir) -> None:
    """Fail if a process, a folder or the token of this run is still there; slurmstepd may be the last to go."""
    wait_for(lambda: not processes_of(run), f"end of {processes_of(run)}", run, timeout_s=10)
    assert folders_of(run) == ()
    assert list(run.root.rglob("ray_token")) == []


def copy_for(node_file: Path, target: Path) -> Path:
    """Copy a file that a test wants to spoil."""
    shutil.copyfile(node_file, target)
    return target


def read_json(path: Path) -> dict:
    """Return the JSON object in a file."""
    return json.loads(path.read_text())
