"""Where actors run: one placement group, one bundle per trainer rank, pinned to a node by the node's own resource.

Rank r stands on node r // ranks_per_node. A trainer rank and the rollout engine of the same bundle share it, since they
never work at the same time. Knows Ray's resources, not what the actors do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from miles_hpc.errors import DriverError
from miles_hpc.plan.plan import Layout

NODE_SHARE = 0.001
"""Part of `miles_hpc_node_<i>` (1 on node i) that each bundle takes: a pin, not a quota."""
ACTOR_SHARE = 0.4
"""Part of a bundle's CPUs and GPU that each of its two actors takes; together below 1."""


def node_resource(node_index: int) -> str:
    """Return the Ray resource by which the agents announce node `node_index`."""
    return f"miles_hpc_node_{node_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The resources of one trainer rank and of the engine that shares them."""

    rank: int
    node_index: int
    num_cpus: int
    num_gpus: int

    def resources(self) -> dict[str, float]:
        """Return Ray's form of the bundle."""
        wanted = {"CPU": float(self.num_cpus), node_resource(self.node_index): NODE_SHARE}
        if self.num_gpus:
            wanted["GPU"] = float(self.num_gpus)
        return wanted


def make_bundles(layout: Layout, cpus_per_rank: int) -> tuple[Bundle, ...]:
    """Return one bundle for each rank, in rank order.

    Args:
        layout: the trainer's grid.
        cpus_per_rank: CPUs that a rank and its engine share.
    """
    return tuple(
        Bundle(
            rank=rank,
            node_index=rank // layout.ranks_per_node,
            num_cpus=cpus_per_rank,
            num_gpus=1 if layout.gpus_per_node else 0,
        )
        for rank in range(layout.world_size)
    )


def find_shortages(
    bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]
) -> tuple[str, ...]:
    """Return, for each node that cannot hold its bundles, what it lacks, with the arithmetic.

    Args:
        bundles: all bundles of the job.
        nodes: resources of each live Ray node.
    """
    shortages = []
    for index in sorted({bundle.node_index for bundle in bundles}):
        on_node = [bundle for bundle in bundles if bundle.node_index == index]
        ranks = ", ".join(str(bundle.rank) for bundle in on_node)
        have = next((node for node in nodes if node_resource(index) in node), None)
        if have is None:
            shortages.append(f"node {index} (ranks {ranks}) is not in the Ray cluster")
            continue
        for kind, each in (("CPU", on_node[0].num_cpus), ("GPU", on_node[0].num_gpus)):
            want = each * len(on_node)
            if want > have.get(kind, 0.0):
                shortages.append(
                    f"node {index} (ranks {ranks}) needs {len(on_node)} bundles * {each} {kind} = {want} {kind}, "
                    f"but has {have.get(kind, 0.0):g}"
                )
    return tuple(shortages)


def reserve(bundles: Sequence[Bundle], deadline_s: float) -> PlacementGroup:
    """Reserve all bundles and return their placement group.

    Raises:
        DriverError: at once when the cluster as it stands can never hold the bundles; else at the deadline, with the
            bundles that the free resources do not cover.
    """
    announced = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shortages = find_shortages(bundles, announced)
    if shortages:
        raise _placement_error("the cluster is too small", bundles, shortages)
    group = placement_group([bundle.resources() for bundle in bundles], strategy="PACK")
    if not group.wait(timeout_seconds=math.ceil(deadline_s)):
        free = list(ray._private.state.available_resources_per_node().values())
        missing = find_shortages(bundles, free) or ("Ray gave no reason; see its gcs_server log",)
        raise _placement_error(f"not placed within {deadline_s:g} s", bundles, missing)
    return group


def _placement_error(
    problem: str, bundles: Sequence[Bundle], shortages: Sequence[str]
) -> DriverError:
    return DriverError(
        f"driver, placement of {len(bundles)} bundles: {problem}: found {'; '.join(shortages)}; expected one bundle per "
        "trainer rank on its node. Ask for more CPUs (cluster.cpus_per_node), or for fewer ranks or threads."
    )
