"""Which rank is which: the map between a rank and its place in the grid, and between ranks, engines and nodes.

Stores nothing: every answer is computed from the layout, so that a plan of thousands of nodes stays small. The order
is Megatron's default, tp-cp-ep-dp-pp: tensor parallel neighbours are adjacent ranks, pipeline stages are farthest apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from miles_hpc.plan.plan import Layout, RolloutLayout

RANK_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlace:
    """Where a rank stands in the grid of everything but the routed experts."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    """Where a rank stands in the grid of the routed experts."""

    etp: int
    ep: int
    edp: int
    pp: int


def dense_place(layout: Layout, rank: int) -> DensePlace:
    """Return the place of `rank`; inverse of `dense_rank`."""
    tp, cp, dp, pp = _digits(rank, (layout.tp, layout.cp, layout.dp, layout.pp))
    return DensePlace(tp=tp, cp=cp, dp=dp, pp=pp)


def dense_rank(layout: Layout, place: DensePlace) -> int:
    """Return the rank at `place`."""
    digits = (place.tp, place.cp, place.dp, place.pp)
    return _number(digits, (layout.tp, layout.cp, layout.dp, layout.pp))


def expert_place(layout: Layout, rank: int) -> ExpertPlace:
    """Return the place of `rank` among the experts; inverse of `expert_rank`."""
    etp, ep, edp, pp = _digits(rank, (layout.etp, layout.ep, layout.edp, layout.pp))
    return ExpertPlace(etp=etp, ep=ep, edp=edp, pp=pp)


def expert_rank(layout: Layout, place: ExpertPlace) -> int:
    """Return the rank at `place`."""
    digits = (place.etp, place.ep, place.edp, place.pp)
    return _number(digits, (layout.etp, layout.ep, layout.edp, layout.pp))


def node_of(layout: Layout, rank: int) -> int:
    """Return the node index of `rank`: ranks fill a node before the next."""
    return rank // layout.ranks_per_node


def first_rollout_gpu(layout: Layout) -> int:
    """Return the first GPU of the job that rollout engines run on: 0 where trainer ranks are on all, else after them."""
    shared = layout.world_size == layout.num_nodes * layout.ranks_per_node
    return 0 if shared else layout.world_size


def engine_of(layout: Layout, rollout: RolloutLayout, gpu: int) -> int | None:
    """Return the index of the rollout engine on the job's GPU `gpu`, which is a rank's own number; None on a trainer's GPU."""
    place = gpu - first_rollout_gpu(layout)
    return None if place < 0 else place // rollout.gpus_per_engine


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """How the communication groups of one axis lie on the nodes.

    Attributes:
        axis: "tp", "cp", "dp", "pp", "etp", "ep", "edp" or "engine".
        size: ranks in one group.
        num_groups: groups of that axis.
        nodes_per_group: nodes that one group touches, at most.
    """

    axis: str
    size: int
    num_groups: int
    nodes_per_group: int

    @property
    def crosses_nodes(self) -> bool:
        """Some group of this axis has ranks on more than one node."""
        return self.nodes_per_group > 1


def group_spans(layout: Layout, rollout: RolloutLayout) -> tuple[GroupSpan, ...]:
    """Return how the groups of every axis lie on nodes, without expanding ranks."""
    axes = (
        ("tp", layout.tp, 1),
        ("cp", layout.cp, layout.tp),
        ("dp", layout.dp, layout.tp * layout.cp),
        ("pp", layout.pp, layout.world_size // layout.pp),
        ("etp", layout.etp, 1),
        ("ep", layout.ep, layout.etp),
        ("edp", layout.edp, layout.etp * layout.ep),
    )
    spans = tuple(
        GroupSpan(
            axis=axis,
            size=size,
            num_groups=layout.world_size // size,
            nodes_per_group=_nodes_of_stride(layout, size, stride),
        )
        for axis, size, stride in axes
    )
    engines = GroupSpan(
        axis="engine",
        size=rollout.gpus_per_engine,
        num_groups=rollout.num_engines,
        nodes_per_group=rollout.nodes_per_engine,
    )
    return (*spans, engines)


def _nodes_of_stride(layout: Layout, size: int, stride: int) -> int:
    """Return the most nodes that a group of ranks base + i * stride touches, over all groups of the axis.

    Bases that differ by a whole number of nodes touch equally many, so that only one node's worth of block starts
    (multiples of size * stride) and the offsets below `stride` inside one node matter.
    """
    per_node, block = layout.ranks_per_node, size * stride
    most = 1
    seen: set[int] = set()
    for start in range(0, layout.world_size, block):
        if start % per_node in seen:
            break
        seen.add(start % per_node)
        for offset in range(min(stride, per_node)):
            first = start + offset
            nodes = {(first + index * stride) // per_node for index in range(size)}
            most = max(most, len(nodes))
            if most == size:
                return most
    return most


def _digits(number: int, sizes: Sequence[int]) -> tuple[int, ...]:
    digits = []
    for size in sizes:
        number, digit = divmod(number, size)
        digits.append(digit)
    return tuple(digits)


def _number(digits: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for digit, size in zip(reversed(digits), reversed(sizes), strict=True):
        number = number * size + digit
    return number
