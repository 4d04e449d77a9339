"""The rank map is a bijection in both grids and is Megatron's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.plan.placement import (
    RANK_ORDER,
    dense_place,
    dense_rank,
    engine_of,
    expert_place,
    expert_rank,
    group_spans,
    node_of,
)
from miles_hpc.plan.plan import Layout, RolloutLayout


def layout_of(tp, pp, cp, dp, ep=1, etp=1, ranks_per_node=None):
    world = tp * pp * cp * dp
    per_node = ranks_per_node or world
    return Layout(
        world_size=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=world // (etp * ep * pp),
        num_nodes=world // per_node,
        gpus_per_node=per_node,
        ranks_per_node=per_node,
    )


@st.composite
def layouts(draw):
    size = st.integers(1, 4)
    tp, pp, cp, dp = draw(size), draw(size), draw(size), draw(size)
    inner = tp * cp * dp
    experts = draw(st.sampled_from([n for n in range(1, inner + 1) if inner % n == 0]))
    etp = draw(st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0]))
    world = inner * pp
    per_node = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    return layout_of(tp, pp, cp, dp, ep=experts // etp, etp=etp, ranks_per_node=per_node)


@given(layouts())
def test_rank_and_dense_place_are_a_bijection(layout):
    ranks = range(layout.world_size)
    places = [dense_place(layout, rank) for rank in ranks]
    assert len(set(places)) == layout.world_size
    assert [dense_rank(layout, place) for place in places] == list(ranks)
    for place in places:
        assert place.tp < layout.tp and place.cp < layout.cp
        assert place.dp < layout.dp and place.pp < layout.pp


@given(layouts())
def test_rank_and_expert_place_are_a_bijection(layout):
    ranks = range(layout.world_size)
    places = [expert_place(layout, rank) for rank in ranks]
    assert len(set(places)) == layout.world_size
    assert [expert_rank(layout, place) for place in places] == list(ranks)
    assert layout.etp * layout.ep * layout.edp == layout.tp * layout.cp * layout.dp


@given(layouts())
def test_both_grids_put_a_rank_on_the_same_pipeline_stage(layout):
    for rank in range(layout.world_size):
        assert dense_place(layout, rank).pp == expert_place(layout, rank).pp


@given(layouts(), st.data())
def test_group_spans_count_the_nodes_that_groups_really_touch(layout, data):
    per_node, world = layout.ranks_per_node, layout.world_size
    tiling = [
        n for n in range(1, world + 1) if world % n == 0 and 0 in (n % per_node, per_node % n)
    ]
    engine = data.draw(st.sampled_from(tiling))
    rollout = RolloutLayout(
        num_engines=world // engine,
        gpus_per_engine=engine,
        nodes_per_engine=max(1, engine // per_node),
    )
    expected = {}
    for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp", "engine"):
        groups = {}
        for rank in range(layout.world_size):
            if axis == "engine":
                key = engine_of(layout, rollout, rank)
            elif axis in ("etp", "ep", "edp"):
                place = expert_place(layout, rank)
                key = tuple(getattr(place, a) for a in ("etp", "ep", "edp", "pp") if a != axis)
            else:
                place = dense_place(layout, rank)
                key = tuple(getattr(place, a) for a in ("tp", "cp", "dp", "pp") if a != axis)
            groups.setdefault(key, []).append(rank)
        touched = max(len({node_of(layout, rank) for rank in group}) for group in groups.values())
        expected[axis] = (len(next(iter(groups.values()))), len(groups), touched)
    spans = {
        s.axis: (s.size, s.num_groups, s.nodes_per_group) for s in group_spans(layout, rollout)
    }
    assert spans == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tp", "pp", "cp", "dp", "ep", "etp"),
    [(2, 2, 2, 2, 4, 1), (8, 1, 1, 4, 32, 1), (1, 4, 1, 16, 16, 1), (4, 2, 1, 2, 2, 2)],
)
def test_the_map_is_that_of_megatron(tp, pp, cp, dp, ep, etp):
    parallel_state = pytest.importorskip("megatron.core.parallel_state", reason="megatron-core")
    layout = layout_of(tp, pp, cp, dp, ep=ep, etp=etp)
    dense = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=RANK_ORDER)
    expert = parallel_state.RankGenerator(
        tp=etp, ep=ep, dp=layout.edp, pp=pp, cp=1, order=RANK_ORDER
    )
    for generator, axes, place_of in (
        (dense, ("tp", "cp", "dp", "pp"), dense_place),
        (expert, ("tp", "ep", "dp", "pp"), expert_place),
    ):
        names = axes if generator is dense else ("etp", "ep", "edp", "pp")
        for axis, name in zip(axes, names, strict=True):
            for group in generator.get_ranks(axis):
                places = [place_of(layout, rank) for rank in group]
                assert [getattr(place, name) for place in places] == list(range(len(group)))
                others = [tuple(getattr(p, n) for n in names if n != name) for p in places]
                assert len(set(others)) == 1
