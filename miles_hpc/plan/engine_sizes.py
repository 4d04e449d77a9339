"""Whether rollout engines tile the nodes that they run on, within a node or across whole ones.

Pure arithmetic. Engines must leave no GPU out: of all that they share with the trainer, or of those that are theirs.
"""

from collections.abc import Iterator

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.plan.grid import nodes_that_divide, rollout_gpus_per_node, rollout_size, world_text
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_MILES = "radixark/miles 31f1ca961"


def _engine_within_nodes(spec: JobSpec) -> Iterator[Verdict]:
    size, own = spec.rollout.gpus_per_engine, spec.rollout.own_gpus
    per_node, world = rollout_gpus_per_node(spec), rollout_size(spec)
    kind, key = (
        ("ranks", "cluster.gpus_per_node")
        if own is None
        else ("GPUs of rollout", "rollout.own_gpus")
    )
    if not world or _tiles(size, per_node, world):
        return
    fix = f"Set rollout.gpus_per_engine = {_near_engine_sizes(size, per_node, world)}."
    if size <= per_node:
        if per_node % size:
            yield Verdict(
                keys=("rollout.gpus_per_engine", key),
                found=f"{per_node} {kind} a node % gpus_per_engine({size}) = {per_node % size}",
                expected="whole engines on each node, with no GPU left out",
                fix=fix,
            )
    elif size % per_node:
        yield Verdict(
            keys=("rollout.gpus_per_engine", key),
            found=f"gpus_per_engine({size}) % {per_node} {kind} a node = {size % per_node}",
            expected="an engine larger than a node to span whole nodes",
            fix=fix,
        )
    elif world % size:
        if own is None:
            text, other = world_text(spec), f"cluster.num_nodes = {nodes_that_divide(spec, size)}"
        else:
            text, other = f"rollout.own_gpus({own})", f"rollout.own_gpus = {-(-own // size) * size}"
        yield Verdict(
            keys=("rollout.gpus_per_engine", "cluster.num_nodes" if own is None else key),
            found=f"{text}, and {world} % gpus_per_engine({size}) = {world % size}",
            expected=f"engines that tile all {kind} of the job",
            fix=f"{fix[:-1]}, or {other}.",
        )


def _tiles(size: int, per_node: int, world: int) -> bool:
    whole = per_node % size == 0 if size <= per_node else size % per_node == 0
    return whole and world % size == 0


def _near_engine_sizes(size: int, per_node: int, world: int) -> str:
    inside = range(1, per_node + 1)
    across = range(2 * per_node, world + 1, per_node)
    fits = [
        count for block in (inside, across) for count in block if _tiles(count, per_node, world)
    ]
    below = max((count for count in fits if count < size), default=None)
    above = min((count for count in fits if count > size), default=None)
    return " or ".join(str(count) for count in (below, above) if count is not None)


ENGINE_SIZE_CHECKS = (
    Check(
        Rule(
            id="MH221",
            fixed=True,
            title="rollout engines tile the nodes",
            reason="An engine fits a whole number of times into a node or spans whole nodes; Miles divides with // and would"
            " silently leave GPUs out. Engines run on every GPU of the job, or on rollout.own_gpus.",
            arithmetic="gpus_per_node % gpus_per_engine = 0, or gpus_per_engine % gpus_per_node = 0;"
            " GPUs of rollout % gpus_per_engine = 0",
            source=f"{_MILES} miles/ray/rollout/rollout_server.py (nnodes = max(1, G // gpus_per_node))",
        ),
        _engine_within_nodes,
    ),
)
