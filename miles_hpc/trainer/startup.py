"""From a Ray address to loaded trainer ranks and rollout engines.

Knows which actor stands where, with which environment and threads; knows nothing of steps.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles_hpc.errors import DriverError
from miles_hpc.paths import RunDir
from miles_hpc.plan.resources import threads_per_bundle
from miles_hpc.preload import merge_preload
from miles_hpc.process import run_short
from miles_hpc.run.events import Kind
from miles_hpc.spec.job import JobSpec, NativeTable
from miles_hpc.trainer.calls import Fleet, Member, await_results
from miles_hpc.trainer.host import Host, RolloutHost, TrainerHost
from miles_hpc.trainer.inputs import DriverEnviron, PlannedJob
from miles_hpc.trainer.placement import ACTOR_SHARE, make_bundles, reserve

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The loaded actors of a run; trainers are awake and engines hold the base model."""

    trainers: Fleet
    engines: Fleet
    model_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What every step of the start needs."""

    planned: PlannedJob
    environ: DriverEnviron
    group: PlacementGroup
    left_s: Callable[[], float]


def native_table(spec: JobSpec) -> NativeTable:
    """Return [engine.native], or its defaults when the spec has none."""
    return spec.engine.native or NativeTable()


def precision(spec: JobSpec) -> str:
    """Return the type of all weights: "fp32" or "bf16"."""
    return native_table(spec).cpu_dtype if spec.cluster.device == "cpu" else spec.model.train_dtype


def connect(address: str) -> None:
    """Connect to the job's Ray.

    Raises:
        DriverError: if nothing answers there.
    """
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DriverError(
            f"driver: found no Ray at {address}: {error}; expected the head that the node agent started. See the head node's log."
        ) from error


def start_actors(run: RunDir, planned: PlannedJob, environ: DriverEnviron) -> Actors:
    """Place, build and load every actor within agent.placement_deadline.

    Raises:
        DriverError: if the placement, the model or an actor fails.
    """
    spec = planned.spec
    started = time.monotonic()
    ends = started + float(spec.agent.placement_deadline)

    def left_s() -> float:
        return max(1.0, ends - time.monotonic())

    bundles = make_bundles(planned.layout, threads_per_bundle(spec))
    start = _Start(
        planned=planned, environ=environ, group=reserve(bundles, left_s()), left_s=left_s
    )
    environ.events.append(Kind.PHASE, phase="load", step=0)
    model_dir = _prepare_model(run, left_s())
    _log.info("model in %s after %.1f s", model_dir, time.monotonic() - started)
    trainers, engines = _build(start, _place_trainers(start), _place_engines(start), model_dir)
    _log.info("actors started after %.1f s", time.monotonic() - started)
    _load(start, trainers, engines)
    environ.events.append(
        Kind.MODEL_LOADED,
        model=spec.model.name,
        seconds=time.monotonic() - started,
        num_trainers=len(trainers.members),
        num_engines=len(engines.members),
    )
    _log.info("loaded after %.1f s", time.monotonic() - started)
    return Actors(trainers=trainers, engines=engines, model_dir=model_dir)


def _prepare_model(run: RunDir, timeout_s: float) -> Path:
    """Prepare the model in a child process, which returns its memory at the end."""
    argv = [sys.executable, "-m", "miles_hpc.trainer.demo_model", str(run.root)]
    done = run_short(argv, timeout_s=timeout_s)
    if not done.ok:
        _log.error("%s", done.stderr)
        last = done.stderr.strip().splitlines()[-1:] or ["(no error text)"]
        raise DriverError(f"driver, model preparation (exit code {done.exit_code}): {last[0]}")
    return Path(done.stdout.strip().splitlines()[-1])


def _place_trainers(start: _Start) -> tuple[Member, ...]:
    threads = native_table(start.planned.spec).threads_per_rank
    return tuple(
        Member(
            name=f"trainer rank {rank}",
            node="?",
            handle=_place(start, TrainerHost, rank, _actor_environ(start, threads, nccl=True)),
        )
        for rank in range(start.planned.layout.world_size)
    )


def _place_engines(start: _Start) -> tuple[Member, ...]:
    rollout, spec = start.planned.rollout, start.planned.spec
    if rollout.nodes_per_engine > 1:
        raise DriverError(
            f"rollout.gpus_per_engine: found {rollout.gpus_per_engine}, which spans {rollout.nodes_per_engine} nodes; "
            "expected an engine inside one node with the native engine. Set gpus_per_engine to at most gpus_per_node."
        )
    threads = native_table(spec).threads_per_engine
    variables = _actor_environ(start, threads, nccl=spec.rollout.engine == "sglang")
    return tuple(
        Member(
            name=f"rollout engine {index}",
            node="?",
            handle=_place(start, RolloutHost, index * rollout.gpus_per_engine, variables),
        )
        for index in range(rollout.num_engines)
    )


def _actor_environ(start: _Start, threads: int, *, nccl: bool) -> dict[str, str]:
    """Return the variables of one actor's process; only a process that uses NCCL gets the preload."""
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if nccl and start.environ.nccl is not None:
        # A runtime environment replaces the variable, so what the site preloads is put back.
        variables["LD_PRELOAD"] = merge_preload(
            memory_saver=None, nccl=str(start.environ.nccl), site=start.environ.site_preload
        )
    return variables


def _place(start: _Start, host: type[Host], bundle: int, variables: dict[str, str]) -> object:
    return (
        ray.remote(host)
        .options(
            num_cpus=ACTOR_SHARE,
            num_gpus=ACTOR_SHARE if start.planned.layout.gpus_per_node else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                start.group, placement_group_bundle_index=bundle
            ),
            runtime_env={"env_vars": variables},
        )
        .remote()
    )


def _build(
    start: _Start, trainers: Sequence[Member], engines: Sequence[Member], model_dir: Path
) -> tuple[Fleet, Fleet]:
    """Have every actor import and make what it hosts."""
    spec, layout = start.planned.spec, start.planned.layout
    spec_json = spec.model_dump_json()
    if start.planned.rollout.gpus_per_engine > 1 and layout.gpus_per_node:
        _widen(start, trainers, engines)
    module = f"miles_hpc.trainer.rollout_{spec.rollout.engine}"
    builds = [
        member.handle.build.remote(
            "miles_hpc.trainer.actor",
            "TrainActor",
            spec_json,
            rank,
            layout.world_size,
            str(model_dir),
        )
        for rank, member in enumerate(trainers)
    ]
    builds += [
        member.handle.build.remote(
            module, "make_engine", spec_json, str(model_dir), precision(spec)
        )
        for member in engines
    ]
    members = [*trainers, *engines]
    nodes = await_results("start of actors", members, builds, deadline_s=start.left_s())
    named = [replace(member, node=node) for member, node in zip(members, nodes, strict=True)]
    return Fleet(tuple(named[: len(trainers)])), Fleet(tuple(named[len(trainers) :]))


def _widen(start: _Start, trainers: Sequence[Member], engines: Sequence[Member]) -> None:
    """Let each engine of several GPUs see those of all its bundles, in the bundles' order; Ray shows it its own alone."""
    size = start.planned.rollout.gpus_per_engine
    asked = [member.handle.gpu_ids.remote() for member in trainers]
    gpu_ids = await_results("GPUs of the bundles", trainers, asked, deadline_s=start.left_s())
    told = [
        member.handle.see_gpus.remote([gpu for ids in gpu_ids[first : first + size] for gpu in ids])
        for member, first in zip(engines, range(0, len(gpu_ids), size), strict=True)
    ]
    await_results("GPUs of the engines", engines, told, deadline_s=start.left_s())


def _load(start: _Start, trainers: Fleet, engines: Fleet) -> None:
    """Join the ranks into one process group and load the weights of both sides."""
    first = trainers.members[0]
    [address] = await_results(
        "rendezvous", [first], [first.handle.node_address.remote()], deadline_s=start.left_s()
    )
    [port] = Fleet((first,)).call("listen", address, deadline_s=start.left_s())
    trainers.call("start", address, port, deadline_s=start.left_s())
    trainers.call("load", deadline_s=start.left_s())
    engines.call("load", deadline_s=start.left_s())
