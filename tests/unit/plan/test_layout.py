"""Published layouts and engine sizes, and what each grid rule says when it is broken."""

import re

import pytest

from miles_hpc.errors import PlanError
from miles_hpc.plan.engine_sizes import ENGINE_SIZE_CHECKS
from miles_hpc.plan.findings import run_checks
from miles_hpc.plan.layout import LAYOUT_CHECKS, make_layout, make_rollout_layout
from miles_hpc.plan.pipeline import stage_layers
from miles_hpc.plan.rules import CHECKS
from tests.unit.plan.specs import GLM52, NATIVE, QWEN38, spec_of

# model, nodes, GPUs a node, tp, pp, cp, ep -> dp, edp: launchers of radixark/miles 31f1ca961, by hand
PUBLISHED = [
    ("qwen3.8 full", 16, 4, 1, 4, 1, 16, 16, 1),
    ("glm-5.2 lora tb2", 4, 8, 8, 1, 1, 32, 4, 1),
    ("kimi-k3", 16, 4, 4, 8, 2, 8, 1, 1),
    ("glm-5.2 gb300", 16, 4, 8, 4, 1, 16, 2, 1),
    ("glm-5.2 256", 32, 8, 4, 8, 8, 32, 1, 1),
    ("glm-5", 16, 8, 4, 4, 2, 32, 4, 1),
    ("glm-5 20 layers", 6, 8, 4, 3, 1, 16, 4, 1),
    ("deepseek v3", 8, 8, 4, 4, 4, 16, 1, 1),
    ("deepseek v3.2", 8, 8, 2, 4, 1, 16, 8, 1),
    ("deepseek v4 8x4", 8, 4, 2, 8, 2, 4, 1, 1),
    ("deepseek v4 8x8", 8, 8, 8, 8, 1, 8, 1, 1),
    ("deepseek v4 pro", 32, 8, 8, 8, 1, 32, 4, 1),
    ("inkling 16x4", 16, 4, 4, 4, 1, 16, 4, 1),
    ("inkling 12x4", 12, 4, 4, 3, 1, 16, 4, 1),
    ("inkling async", 8, 4, 4, 2, 1, 16, 4, 1),
    ("inkling small", 4, 8, 4, 8, 1, 4, 1, 1),
    ("kimi-k2", 32, 8, 8, 8, 4, 32, 1, 1),
    ("nemotron ultra", 16, 8, 8, 4, 1, 32, 4, 1),
    ("nemotron super", 2, 8, 4, 2, 1, 8, 2, 1),
    ("qwen3-next", 4, 8, 2, 4, 2, 8, 2, 1),
    ("qwen3-235b", 8, 8, 4, 4, 2, 16, 2, 1),
    ("glm-5.2 tbench2", 8, 4, 2, 4, 4, 8, 1, 1),
    ("nemotron nano", 1, 8, 2, 2, 1, 1, 2, 4),
    ("glm-4.5", 16, 4, 4, 4, 2, 8, 2, 2),
]


def grid(nodes, per_node, tp, pp, cp, ep, **more):
    return spec_of(
        {
            "model.num_experts": 896,
            "model.moe_ffn_hidden_size": 2048,
            "model.num_layers": 24,
            "cluster.num_nodes": nodes,
            "cluster.gpus_per_node": per_node,
            "parallel.tp": tp,
            "parallel.pp": pp,
            "parallel.cp": cp,
            "parallel.ep": ep,
            "parallel.sequence_parallel": tp > 1,
            "rollout.gpus_per_engine": 1,
        },
        **more,
    )


@pytest.mark.parametrize(
    ("name", "n", "g", "t", "p", "c", "e", "dp", "edp"),
    PUBLISHED,
    ids=[row[0] for row in PUBLISHED],
)
def test_a_published_layout_has_its_published_data_parallel_sizes(name, n, g, t, p, c, e, dp, edp):
    layout = make_layout(grid(n, g, t, p, c, e))
    assert (layout.world_size, layout.dp, layout.edp) == (n * g, dp, edp)


@pytest.mark.parametrize(("nodes", "per_node", "ep", "needed"), [(16, 8, 32, 32), (8, 4, 8, 16)])
def test_a_launcher_that_admits_too_few_nodes_is_refused_with_the_nodes_it_needs(
    nodes, per_node, ep, needed
):
    tp, pp, cp = (4, 8, 8) if nodes == 16 else (4, 8, 2)
    with pytest.raises(PlanError, match="MH202") as caught:
        make_layout(grid(nodes, per_node, tp, pp, cp, ep))
    text = str(caught.value)
    assert f"tp({tp}) * pp({pp}) * cp({cp}) = {tp * pp * cp} ranks" in text
    assert f"= {nodes * per_node} ranks" in text
    assert f"cluster.num_nodes = {needed}" in text


@pytest.mark.parametrize(
    ("size", "per_node", "world", "nodes_per_engine", "num_engines"),
    [(16, 4, 64, 4, 4), (16, 8, 32, 2, 2), (4, 8, 8, 1, 2), (8, 8, 8, 1, 1)],
)
def test_engines_tile_the_nodes(size, per_node, world, nodes_per_engine, num_engines):
    spec = spec_of(
        cluster__num_nodes=world // per_node,
        cluster__gpus_per_node=per_node,
        rollout__gpus_per_engine=size,
    )
    rollout = make_rollout_layout(spec)
    assert (rollout.nodes_per_engine, rollout.num_engines) == (nodes_per_engine, num_engines)
    assert rollout.num_engines * rollout.gpus_per_engine == world


@pytest.mark.parametrize(
    ("size", "nodes", "text", "near"),
    [
        (6, 1, "8 ranks a node % gpus_per_engine(6) = 2", "4 or 8"),
        (12, 3, "gpus_per_engine(12) % 8 ranks a node = 4", "8 or 24"),
        (16, 3, "24 % gpus_per_engine(16) = 8", "8 or 24, or cluster.num_nodes = 4"),
    ],
)
def test_an_engine_that_leaves_gpus_out_is_refused_with_the_nearest_sizes(size, nodes, text, near):
    spec = spec_of(cluster__num_nodes=nodes, rollout__gpus_per_engine=size)
    with pytest.raises(PlanError, match="MH221") as caught:
        make_rollout_layout(spec)
    assert text in str(caught.value)
    assert f"rollout.gpus_per_engine = {near}." in str(caught.value)


BROKEN = [
    ("MH201", {"cluster.gpus_per_node": 0}, "gpus_per_node = 0"),
    ("MH202", {"parallel.pp": 3, "model.num_layers": 60}, "8 = 2 * 3 + 2"),
    ("MH203", {"parallel.ep": 16, "model.num_experts": 64}, "8 = 0 * 16 + 8"),
    ("MH204", {"parallel.tp": 8, "model.num_attention_heads": 36}, "num_attention_heads(36) % tp(8) = 4"),
    ("MH205", {"parallel.tp": 8, "model.num_query_groups": 3}, "num_query_groups(3) and tp(8)"),
    ("MH205", {"parallel.tp": 8, "model.num_query_groups": 4, "lora": {"rank": 8, "alpha": 8.0}}, "4 % 8 = 4"),
    ("MH206", {"parallel.tp": 8, "model.ffn_hidden_size": 4100}, "ffn_hidden_size(4100) % tp(8) = 4"),
    ("MH207", {"parallel.ep": 8, "model.num_experts": 60}, "num_experts(60) % ep(8) = 4"),
    ("MH207", {"parallel.ep": 8}, "dense model"),
    ("MH208", {"parallel.pp": 8, "model.num_layers": 92}, "92 % 8 = 4"),
    ("MH208", {"parallel.first_stage_layers": 10}, "pp(1)"),
    ("MH208", {"parallel.pp": 2, "parallel.first_stage_layers": 30, "parallel.last_stage_layers": 30}, "4 layers left over"),
    ("MH208", {"parallel.pp": 4, "parallel.first_stage_layers": 64}, "0 layers for 3 equal stages"),
    ("MH210", {"parallel.tp": 2, "model.num_experts": 64}, "sequence_parallel = false"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "changes", "text"), BROKEN)
def test_a_broken_grid_rule_is_named_with_its_arithmetic(rule, changes, text):
    findings = run_checks(LAYOUT_CHECKS, spec_of(changes))
    assert any(f.id == rule and text in f.message for f in findings), findings


def test_the_native_engine_wants_whole_query_groups_on_every_rank():
    changes = {"parallel.tp": 8, "model.num_query_groups": 4}
    assert run_checks(LAYOUT_CHECKS, spec_of(changes)) == ()
    assert [f.id for f in run_checks(LAYOUT_CHECKS, spec_of(changes, NATIVE))] == ["MH205"]


def test_nine_heads_and_three_groups_forbid_two_tensor_parallel_ranks():
    spec = spec_of(
        NATIVE,
        model__num_attention_heads=9,
        model__num_query_groups=3,
        model__ffn_hidden_size=1536,
        parallel__tp=2,
    )
    assert {f.id for f in run_checks(LAYOUT_CHECKS, spec)} == {"MH204", "MH205"}


def test_all_broken_rules_are_reported_at_once():
    spec = spec_of(parallel__tp=3, parallel__pp=5, model__num_attention_heads=64)
    with pytest.raises(PlanError) as caught:
        make_layout(spec)
    named = re.findall(r"^(MH\d+)", str(caught.value), re.MULTILINE)
    assert {"MH202", "MH203", "MH204", "MH205", "MH206", "MH208"} <= set(named)


@pytest.mark.parametrize(
    ("pp", "first", "last", "right"),
    [
        (4, 18, None, True),
        (8, 14, 16, True),
        (4, None, 18, False),
        (2, None, None, False),
        (2, 38, None, True),
    ],
)
def test_a_glm_stage_starts_on_a_layer_with_its_own_top_k(pp, first, last, right):
    changes = {"parallel.pp": pp}
    if first:
        changes["parallel.first_stage_layers"] = first
    if last:
        changes["parallel.last_stage_layers"] = last
    findings = run_checks(LAYOUT_CHECKS, spec_of(GLM52, changes))
    assert ("MH209" not in {f.id for f in findings}) is right


def test_stage_layers_add_up():
    assert stage_layers(spec_of(GLM52, {"parallel.pp": 4, "parallel.first_stage_layers": 18})) == (
        18,
        20,
        20,
        20,
    )
    assert stage_layers(spec_of(QWEN38)) == (23, 23, 23, 23)
    assert sum(stage_layers(spec_of())) == 64


def test_sequence_parallel_without_tensor_parallel_is_only_a_warning():
    findings = run_checks(LAYOUT_CHECKS, spec_of(parallel__sequence_parallel=True))
    assert [(f.id, f.level) for f in findings] == [("MH210", "warning")]
    assert make_layout(spec_of(parallel__sequence_parallel=True)).dp == 8


@pytest.mark.parametrize("recipe", [QWEN38, GLM52])
def test_the_large_recipes_break_no_rule(recipe):
    assert run_checks(CHECKS, spec_of(recipe)) == ()


def test_engine_sizes_of_a_job_without_ranks_say_nothing_more():
    assert run_checks(ENGINE_SIZE_CHECKS, spec_of(cluster__gpus_per_node=0)) == ()
