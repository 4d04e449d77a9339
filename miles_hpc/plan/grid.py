"""The world of a job and its two grids: how many ranks there are and whether they divide into replicas.

Pure arithmetic. Whether the model divides too is `division` and `pipeline`; which rank sits where is `placement`.
"""

from collections.abc import Iterator
from math import lcm

from miles_hpc.plan.findings import Check, Verdict
from miles_hpc.spec.job import JobSpec
from miles_hpc.spec.rules import Rule

_MCORE = "megatron-core 0.16.1"


def ranks_per_node(spec: JobSpec) -> int:
    """Return the GPUs of one node, or on CPU the ranks that the spec says; shared, each holds one trainer rank."""
    cluster = spec.cluster
    return cluster.gpus_per_node if cluster.device == "gpu" else cluster.cpu_ranks_per_node


def world_size(spec: JobSpec) -> int:
    """Return the number of trainer ranks; every GPU that rollout engines do not have for themselves holds one."""
    return max(0, spec.cluster.num_nodes * ranks_per_node(spec) - (spec.rollout.own_gpus or 0))


def rollout_size(spec: JobSpec) -> int:
    """Return the number of GPUs that rollout engines run on."""
    own = spec.rollout.own_gpus
    return world_size(spec) if own is None else own


def trainer_ranks_per_node(spec: JobSpec) -> int:
    """Return the trainer ranks on a node that has some."""
    return min(ranks_per_node(spec), world_size(spec))


def rollout_gpus_per_node(spec: JobSpec) -> int:
    """Return the GPUs of rollout engines on a node that has some."""
    return min(ranks_per_node(spec), rollout_size(spec))


def nodes_that_divide(spec: JobSpec, ranks: int) -> int:
    """Return the smallest node count, not below the spec's, whose trainer ranks are a multiple of `ranks`."""
    now, own = spec.cluster.num_nodes, spec.rollout.own_gpus or 0
    per_node = ranks_per_node(spec)
    counts = (now + more for more in range(ranks))
    fits = (n for n in counts if n * per_node > own and (n * per_node - own) % ranks == 0)
    return next(fits, now)


def world_text(spec: JobSpec) -> str:
    """Return the arithmetic of `world_size` for a message."""
    kind = "gpus_per_node" if spec.cluster.device == "gpu" else "cpu_ranks_per_node"
    own = spec.rollout.own_gpus
    return (
        f"cluster.num_nodes({spec.cluster.num_nodes}) * {kind}({ranks_per_node(spec)})"
        + ("" if own is None else f" - rollout.own_gpus({own})")
        + f" = {world_size(spec)} ranks"
    )


def _has_ranks(spec: JobSpec) -> Iterator[Verdict]:
    cluster = spec.cluster
    if cluster.device == "gpu" and cluster.gpus_per_node == 0:
        yield Verdict(
            keys=("cluster.gpus_per_node", "cluster.device"),
            found='device "gpu" with gpus_per_node = 0',
            expected="at least one GPU on each node",
            fix='Set cluster.gpus_per_node, or device = "cpu".',
        )


def _own_gpus(spec: JobSpec) -> Iterator[Verdict]:
    own, nodes, per_node = spec.rollout.own_gpus, spec.cluster.num_nodes, ranks_per_node(spec)
    if own is None or not per_node:
        return
    text = f"rollout.own_gpus({own}) of num_nodes({nodes}) * gpus_per_node({per_node}) = {nodes * per_node} GPUs"
    if own >= nodes * per_node:
        yield Verdict(
            keys=("rollout.own_gpus", "cluster.num_nodes"),
            found=text,
            expected="GPUs left for the trainer",
            fix=f"Set cluster.num_nodes = {-(-own // per_node) + 1}, or a smaller rollout.own_gpus.",
        )
    elif nodes > 1 and own % per_node:
        below, above = own // per_node * per_node, -(-own // per_node) * per_node
        near = [count for count in (below, above) if 0 < count < nodes * per_node]
        yield Verdict(
            keys=("rollout.own_gpus", "cluster.gpus_per_node"),
            found=f"{text}, and {own} % {per_node} = {own % per_node}",
            expected="whole nodes for rollout, or a part of the only node: Miles gives the trainer equal ranks on each of its nodes",
            fix=f"Set rollout.own_gpus = {' or '.join(map(str, near))}.",
        )


def _dense_grid(spec: JobSpec) -> Iterator[Verdict]:
    p, world = spec.parallel, world_size(spec)
    replica = p.tp * p.pp * p.cp
    if world and world % replica:
        yield Verdict(
            keys=("parallel.tp", "parallel.pp", "parallel.cp", "cluster.num_nodes"),
            found=f"tp({p.tp}) * pp({p.pp}) * cp({p.cp}) = {replica} ranks a replica, but {world_text(spec)},"
            f" and {world} = {world // replica} * {replica} + {world % replica}",
            expected="a whole number of replicas (data parallel size)",
            fix=f"Set cluster.num_nodes = {nodes_that_divide(spec, replica)}, or a product tp * pp * cp that divides {world}.",
        )


def _expert_grid(spec: JobSpec) -> Iterator[Verdict]:
    p, world = spec.parallel, world_size(spec)
    replica = p.etp * p.ep * p.pp
    if world and world % replica:
        both = lcm(replica, p.tp * p.pp * p.cp)
        yield Verdict(
            keys=("parallel.ep", "parallel.etp", "parallel.pp", "cluster.num_nodes"),
            found=f"etp({p.etp}) * ep({p.ep}) * pp({p.pp}) = {replica} ranks an expert replica, but {world_text(spec)},"
            f" and {world} = {world // replica} * {replica} + {world % replica}",
            expected="a whole number of expert replicas (expert data parallel size)",
            fix=f"Set cluster.num_nodes = {nodes_that_divide(spec, both)}, or a product etp * ep * pp that divides {world}.",
        )


GRID_CHECKS = (
    Check(
        Rule(
            id="MH201",
            fixed=True,
            title="a job has ranks on the device it names",
            reason="Every trainer rank and rollout engine needs a GPU, or a CPU rank when device is cpu.",
            arithmetic="world = num_nodes * gpus_per_node (gpu) or num_nodes * cpu_ranks_per_node (cpu)",
            source="docs/reference/job-spec.md",
        ),
        _has_ranks,
    ),
    Check(
        Rule(
            id="MH211",
            fixed=True,
            title="GPUs for both sides",
            reason="Rollout engines with GPUs of their own take the last of the job: Miles sorts all by node and GPU, gives the"
            " first ones to the trainer, the same number on each of its nodes, and the rest to the engines.",
            arithmetic="own_gpus < num_nodes * gpus_per_node; own_gpus % gpus_per_node = 0 with more than one node",
            source="radixark/miles 31f1ca961 miles/ray/placement_group.py; miles/utils/arguments.py (actor_num_gpus_per_node)",
        ),
        _own_gpus,
    ),
    Check(
        Rule(
            id="MH202",
            fixed=True,
            title="whole model replicas",
            reason="Megatron splits the world into replicas of tp * pp * cp ranks; the number of replicas is dp.",
            arithmetic="world % (tp * pp * cp) = 0; dp = world / (tp * pp * cp)",
            source=f"{_MCORE} core/parallel_state.py initialize_model_parallel",
        ),
        _dense_grid,
    ),
    Check(
        Rule(
            id="MH203",
            fixed=True,
            title="whole expert replicas",
            reason="Experts have their own grid over the same ranks and pipeline stages; the number of its replicas is edp.",
            arithmetic="world % (etp * ep * pp) = 0; edp = world / (etp * ep * pp), so ep * etp * edp = tp * cp * dp",
            source=f"{_MCORE} core/parallel_state.py initialize_model_parallel",
        ),
        _expert_grid,
    ),
)
