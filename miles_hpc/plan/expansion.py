"""The placement of one plan written out: every rank and rollout engine on its node and GPU, and what crosses nodes.

A plan stores only the rule (`plan.placement`); this is made on request, since it grows with the job. Knows no file and
no name of a node: nodes are numbered in the order of the allocation.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles_hpc.plan.placement import (
    RANK_ORDER,
    dense_place,
    engine_of,
    expert_place,
    first_rollout_gpu,
    group_spans,
    node_of,
)
from miles_hpc.plan.plan import Layout, RolloutLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """One trainer rank.

    Attributes:
        gpu: index on its node; without GPUs the number of the process there.
        engine: the rollout engine that shares this GPU; None where engines have GPUs of their own.
    """

    rank: int
    node: int
    gpu: int
    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    engine: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One rollout engine: the nodes it is on, and its GPUs on each of them."""

    engine: int
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlace:
    """The communication groups of one axis, and how many of them have ranks on more than one node."""

    axis: str
    size: int
    groups: int
    crossing: int
    nodes_per_group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Everything that `plan --placement` shows."""

    order: str
    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]
    axes: tuple[AxisPlace, ...]


def expand_placement(layout: Layout, rollout: RolloutLayout) -> Placement:
    """Return the place of every rank and engine of `layout`."""
    ranks = tuple(_rank(layout, rollout, rank) for rank in range(layout.world_size))
    engines = tuple(_engine(layout, rollout, engine) for engine in range(rollout.num_engines))
    axes = tuple(
        AxisPlace(
            axis=span.axis,
            size=span.size,
            groups=span.num_groups,
            crossing=_crossing(ranks, span.axis)
            if span.axis != "engine"
            else sum(len(engine.nodes) > 1 for engine in engines),
            nodes_per_group=span.nodes_per_group,
        )
        for span in group_spans(layout, rollout)
        if span.size > 1
    )
    return Placement(order=RANK_ORDER, ranks=ranks, engines=engines, axes=axes)


def _rank(layout: Layout, rollout: RolloutLayout, rank: int) -> RankPlace:
    dense, expert = dense_place(layout, rank), expert_place(layout, rank)
    return RankPlace(
        rank=rank,
        node=node_of(layout, rank),
        gpu=rank % layout.ranks_per_node,
        tp=dense.tp,
        cp=dense.cp,
        dp=dense.dp,
        pp=dense.pp,
        etp=expert.etp,
        ep=expert.ep,
        edp=expert.edp,
        engine=engine_of(layout, rollout, rank),
    )


def _engine(layout: Layout, rollout: RolloutLayout, engine: int) -> EnginePlace:
    start = first_rollout_gpu(layout) + engine * rollout.gpus_per_engine
    gpus = range(start, start + rollout.gpus_per_engine)
    return EnginePlace(
        engine=engine,
        nodes=_sorted(node_of(layout, gpu) for gpu in gpus),
        gpus=_sorted(gpu % layout.ranks_per_node for gpu in gpus),
    )


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


_GRIDS = (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))


def _crossing(ranks: Sequence[RankPlace], axis: str) -> int:
    """Return how many groups of `axis` have ranks on more than one node."""
    others = next((tuple(a for a in grid if a != axis) for grid in _GRIDS if axis in grid), ())
    nodes: dict[tuple[int, ...], set[int]] = {}
    for place in ranks:
        nodes.setdefault(tuple(getattr(place, name) for name in others), set()).add(place.node)
    return sum(len(found) > 1 for found in nodes.values())


def placement_lines(placement: Placement) -> tuple[str, ...]:
    """Return the placement as text: the axes, one line an engine, one line a rank; at most 100 columns."""
    lines = [f"  rank order {placement.order}, the first named changing fastest", "", "  groups"]
    for axis in placement.axes:
        lines.append(
            f"    {axis.axis:<8}{axis.groups} of {axis.size}: "
            + (
                f"{axis.crossing} cross nodes, {axis.nodes_per_group} nodes at most"
                if axis.crossing
                else "inside a node"
            )
        )
    lines += ["", "  engines"]
    for engine in placement.engines:
        nodes, gpus = _span(engine.nodes), _span(engine.gpus)
        lines.append(f"    engine {engine.engine:<6}nodes {nodes:<14}GPUs {gpus}")
    names = ("rank", "node", "gpu", "tp", "cp", "dp", "pp", "etp", "ep", "edp", "engine")
    lines += ["", "  ranks", "  " + "".join(f"{name:>8}" for name in names)]
    lines += [
        "  " + "".join(f"{_cell(place, name):>8}" for name in names) for place in placement.ranks
    ]
    return tuple(lines)


def _cell(place: RankPlace, name: str) -> str:
    value = getattr(place, name)
    return "-" if value is None else str(value)


def _span(numbers: Sequence[int]) -> str:
    """Return neighbouring `numbers` as "first-last"; engines are always on neighbouring nodes and GPUs."""
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
