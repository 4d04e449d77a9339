"""`plan --placement`: the written-out placement agrees with the rule that a plan stores."""

import json
from collections import Counter

import pytest

from miles_hpc.cli import main
from miles_hpc.engine.compose import draft_plan
from miles_hpc.plan.expansion import expand_placement, placement_lines
from miles_hpc.plan.layout import make_layout, make_rollout_layout
from miles_hpc.plan.placement import DensePlace, ExpertPlace, dense_rank, expert_rank, group_spans
from tests.unit.plan.specs import GLM52, QWEN38, spec_of
from tests.unit.spec.written import MILES, write

LAYOUTS = [
    {},
    QWEN38,
    GLM52,
    {"cluster.num_nodes": 4, "parallel.tp": 2, "parallel.cp": 4, "parallel.pp": 2},
]


def parts(changes):
    spec = spec_of(changes)
    return make_layout(spec), make_rollout_layout(spec)


@pytest.mark.parametrize("changes", LAYOUTS)
def test_every_rank_is_once_on_its_node_and_gpu_at_its_place(changes):
    layout, rollout = parts(changes)
    placement = expand_placement(layout, rollout)
    assert [place.rank for place in placement.ranks] == list(range(layout.world_size))
    assert len({(p.node, p.gpu) for p in placement.ranks}) == layout.world_size
    for p in placement.ranks:
        assert p.node * layout.ranks_per_node + p.gpu == p.rank
        assert dense_rank(layout, DensePlace(tp=p.tp, cp=p.cp, dp=p.dp, pp=p.pp)) == p.rank
        assert expert_rank(layout, ExpertPlace(etp=p.etp, ep=p.ep, edp=p.edp, pp=p.pp)) == p.rank


@pytest.mark.parametrize("changes", LAYOUTS)
def test_engines_tile_the_gpus_and_crossing_groups_are_counted(changes):
    layout, rollout = parts(changes)
    placement = expand_placement(layout, rollout)
    assert len(placement.engines) == rollout.num_engines
    sizes = Counter(place.engine for place in placement.ranks)
    assert set(sizes.values()) == {rollout.gpus_per_engine}
    for engine in placement.engines:
        assert len(engine.nodes) * len(engine.gpus) == rollout.gpus_per_engine
    spans = {span.axis: span for span in group_spans(layout, rollout)}
    for axis in placement.axes:
        assert (axis.crossing > 0) == spans[axis.axis].crosses_nodes
        assert axis.crossing <= axis.groups == spans[axis.axis].num_groups


def test_a_tensor_parallel_group_inside_a_node_does_not_cross_and_experts_do():
    axes = {axis.axis: axis for axis in expand_placement(*parts(GLM52)).axes}
    assert (axes["tp"].groups, axes["tp"].crossing) == (4, 0)
    assert (axes["ep"].groups, axes["ep"].crossing, axes["ep"].nodes_per_group) == (1, 1, 4)
    assert (axes["engine"].groups, axes["engine"].crossing) == (2, 2)


def test_only_some_groups_of_an_axis_may_cross():
    # 3 GPUs a node and pairs: the second pair of every three lies on two nodes.
    layout, rollout = parts({"cluster.num_nodes": 2, "cluster.gpus_per_node": 3, "parallel.tp": 2})
    (tp,) = [axis for axis in expand_placement(layout, rollout).axes if axis.axis == "tp"]
    assert (tp.groups, tp.crossing) == (3, 1)


def test_the_text_names_every_rank_engine_and_crossing_axis():
    text = "\n".join(placement_lines(expand_placement(*parts(GLM52))))
    assert "tp      4 of 8: inside a node" in text
    assert "ep      1 of 32: 1 cross nodes, 4 nodes at most" in text
    assert "engine 1     nodes 2-3           GPUs 0-7" in text
    last = text.splitlines()[-1].split()
    assert last == ["31", "3", "7", "7", "0", "3", "0", "0", "31", "0", "1"]


def test_the_json_has_the_placement_on_request_only(tmp_path, monkeypatch, capsys):
    path = str(write(tmp_path, "job.toml", MILES))
    shown = []
    for flags in (["--json"], ["--json", "--placement"]):
        monkeypatch.setattr("sys.argv", ["miles-hpc", "plan", path, *flags])
        with pytest.raises(SystemExit):
            main()
        shown.append(json.loads(capsys.readouterr().out))
    assert "placement" not in shown[0]
    assert len(shown[1].pop("placement")["ranks"]) == 16
    assert shown[0] == shown[1]


def test_the_stored_plan_of_many_nodes_stays_as_small_as_that_of_few():
    big = {**QWEN38, "cluster.num_nodes": 4096, "rollout.prompts_per_step": 8192}
    sizes = [
        len(draft_plan(spec_of(changes), python="p", package_version="0").to_json())
        for changes in (QWEN38, big)
    ]
    assert abs(sizes[1] - sizes[0]) < 2000
