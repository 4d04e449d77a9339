"""Rollout engines with GPUs of their own: the trainer's world, where engines are, and the memory of both kinds of nodes.

Layouts and figures of radixark/miles 31f1ca961: run_qwen3_235b_a22b.py, run_qwen3_next_80b_a3b.py --topology single-node,
openenv/glm52_tbench2 and run_inkling.py --fully-async.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_hpc.engine.compose import draft_plan, find, memory_of
from miles_hpc.errors import SpecError
from miles_hpc.launch.describe import describe_plan
from miles_hpc.plan.expansion import expand_placement, placement_lines
from miles_hpc.plan.figures import node_figure
from miles_hpc.plan.findings import errors_of
from miles_hpc.plan.layout import make_layout, make_rollout_layout
from miles_hpc.plan.page import render_page
from miles_hpc.plan.phases import PHASES
from miles_hpc.plan.placement import engine_of
from miles_hpc.plan.rules import nearest_fits
from miles_hpc.spec.load import load_spec
from tests.fakes.recipes import ROOT
from tests.unit.plan.specs import spec_of

GIB = 2**30
OWN = {
    "rollout.own_gpus": 8,
    "rollout.gpus_per_engine": 4,
    "cluster.num_nodes": 3,
    "cluster.node_memory": "1TiB",
    "cluster.gpu_memory": "80GiB",
    "offload.train": "none",
    "offload.rollout": "none",
}
ONE_NODE = {**OWN, "cluster.num_nodes": 1, "rollout.own_gpus": 2, "rollout.gpus_per_engine": 2, "parallel.pp": 2, "train.max_tokens_per_gpu": 8192, "rollout.prompts_per_step": 3}  # fmt: skip


def recipe(name, *overrides):
    return load_spec(ROOT / "jobs" / f"{name}.toml", overrides=overrides).spec


@pytest.mark.parametrize(
    ("name", "world", "dp", "engines", "nodes_per_engine"),
    [
        ("qwen3_235b", 64, 2, 2, 4),
        ("deepseek_v32", 64, 8, 8, 1),
        ("joyai_llm_flash", 4, 1, 4, 1),
        ("qwen3_next_80b_1x8", 6, 1, 1, 1),
        ("inkling_async_12x4", 32, 4, 1, 4),
        ("glm52_tbench2_async", 32, 1, 8, 1),
    ],
)
def test_the_trainers_world_is_what_rollout_leaves(name, world, dp, engines, nodes_per_engine):
    spec = recipe(name)
    layout, rollout = make_layout(spec), make_rollout_layout(spec)
    assert (layout.world_size, layout.dp) == (world, dp)
    assert (rollout.num_engines, rollout.nodes_per_engine) == (engines, nodes_per_engine)
    assert rollout.num_engines * rollout.gpus_per_engine == spec.rollout.own_gpus


@settings(deadline=None)
@given(st.integers(1, 6), st.sampled_from([1, 2, 4, 8]), st.data())
def test_every_gpu_has_either_a_rank_or_an_engine(nodes, per_node, data):
    whole = [per_node * count for count in range(1, nodes)]
    own = data.draw(st.sampled_from(whole or list(range(1, per_node)) or [0]))
    if not own:
        return
    per_engine_node = min(per_node, own)
    size = data.draw(
        st.sampled_from([n for n in range(1, per_engine_node + 1) if per_engine_node % n == 0])
    )
    spec = spec_of(OWN, {
        "cluster.num_nodes": nodes, "cluster.gpus_per_node": per_node,
        "rollout.own_gpus": own, "rollout.gpus_per_engine": size,
    })  # fmt: skip
    layout, rollout = make_layout(spec), make_rollout_layout(spec)
    gpus = range(nodes * per_node)
    engines = [engine_of(layout, rollout, gpu) for gpu in gpus]
    assert [engine is None for engine in engines] == [gpu < layout.world_size for gpu in gpus]
    assert max(engine for engine in engines if engine is not None) == rollout.num_engines - 1
    placement = expand_placement(layout, rollout)
    assert all(place.engine is None for place in placement.ranks)
    theirs = [(n, g) for engine in placement.engines for n in engine.nodes for g in engine.gpus]
    ranks = [(place.node, place.gpu) for place in placement.ranks]
    assert sorted(ranks + theirs) == [divmod(gpu, per_node) for gpu in gpus]


def test_text_page_and_figure_show_both_kinds():
    spec = spec_of(OWN)
    plan = draft_plan(spec, python="/p", package_version="0").plan
    assert plan is not None
    text = describe_plan(plan, placement=True)
    assert max(map(len, text.splitlines())) <= 100
    assert "  trainer     host a node" in text and "  engines     host a node" in text
    assert "engine 1     nodes 2             GPUs 4-7" in text
    page = render_page(plan)
    assert "Host memory of a node of the trainer" in page
    assert "Host memory of a node of rollout" in page
    figure = node_figure(plan.layout, plan.rollout)
    assert figure.count(">rank ") == 16 and figure.count(">engine ") == 8
    last = placement_lines(expand_placement(plan.layout, plan.rollout))[-1].split()
    assert last[0] == "15" and last[-1] == "-"


def test_nobody_sleeps_and_nothing_is_backed_up():
    memory = memory_of(spec_of(OWN))
    names = [name for name in PHASES if name != "handoff"]
    assert [phase.name for phase in memory.phases] == names
    assert [phase.name for phase in memory.rollout_phases] == names
    for phase in memory.everywhere:
        assert not {"host.trainer_backup", "host.engine_backup", "host.pinned_trainer_copy"} & set(
            phase.parts
        )
        for place, total in (
            ("host", phase.host_bytes_per_node),
            ("gpu", phase.gpu_bytes_per_gpu),
        ):
            parts = phase.parts.items()
            assert sum(count for part, count in parts if part.startswith(f"{place}.")) == total
    assert "gpu.engine_weights" not in memory.phase("train").parts
    assert all("gpu.trainer_weights" not in phase.parts for phase in memory.rollout_phases)


def test_a_model_to_switch_to_is_pinned_beside_the_actor():
    """Source: miles/backends/megatron_utils/actor.py (_enable_weight_backup)."""
    copies = [
        memory_of(spec_of(OWN, changes)).phase("train").parts.get("host.pinned_trainer_copy", 0)
        for changes in (
            {},
            {"train.kl_coef": 0.1},
            {"engine.miles.extra_args": {"opd-teacher-load": "/t", "keep-old-actor": True}},
        )
    ]
    weights = memory_of(spec_of(OWN)).phase("train").parts["gpu.trainer_weights"]
    ranks = 8
    assert copies == [0, 2 * ranks * weights, 4 * ranks * weights]


def test_one_node_that_both_divide_holds_both():
    memory = memory_of(spec_of(ONE_NODE))
    for trainer, engines in zip(memory.phases, memory.rollout_phases, strict=True):
        assert trainer.host_bytes_per_node == engines.host_bytes_per_node
    assert memory.phase("load").parts["host.residual"] > 8 * 15e9 - 16 * GIB


def test_each_kind_of_node_is_judged():
    full = {"rollout.mem_fraction_static": 1.0}
    found = {f.id: f.message for f in errors_of(find(spec_of(OWN, full)))}
    assert "of rollout: kv_cache(" in found["MH302"]
    assert "Lower rollout.mem_fraction_static." in found["MH302"]
    small = errors_of(
        find(spec_of(OWN, full, {"cluster.gpu_memory": "2GiB", "rollout.gpus_per_engine": 8}))
    )
    assert [f.id for f in small].count("MH302") == 2
    host = errors_of(find(spec_of(OWN, {"cluster.node_memory": "64GiB"})))
    assert [" of the trainer" in f.message for f in host if f.id == "MH301"] == [True, False]


def test_bf16_gradients_take_half():
    """run_inkling.py --fully-async passes --grad-reduce-in-bf16."""
    flag = "engine.miles.extra_args.grad-reduce-in-bf16=false"
    bf16, fp32 = (memory_of(recipe("inkling_async_12x4", *more)) for more in ((), (flag,)))
    name = "gpu.adapters_and_gradients"
    assert fp32.phase("train").parts[name] == 2 * bf16.phase("train").parts[name]


def test_the_buffer_of_weight_updates_is_the_flags():
    parts = memory_of(recipe("qwen3_235b")).phase("weight_sync").parts
    assert parts["gpu.update_buffer"] == 4 * GIB


@pytest.mark.parametrize(
    ("changes", "phrase"),
    [
        ({"rollout.own_gpus": 12}, "set rollout.own_gpus = 8"),
        ({"rollout.own_gpus": 8, "rollout.gpus_per_engine": 16}, "set rollout.own_gpus = 16"),
        ({"parallel.tp": 8, "parallel.pp": 4}, "set cluster.num_nodes = 5"),
    ],
)
def test_what_would_fit_counts_the_gpus_of_both(changes, phrase):
    spec = spec_of(OWN, changes)
    assert errors_of(find(spec))
    assert any(phrase in change for change in nearest_fits(spec, find))


def test_the_native_engine_shares_all_gpus():
    with pytest.raises(SpecError, match=r"rollout\.own_gpus.*MH102"):
        load_spec(ROOT / "jobs" / "demo_tiny.toml", overrides=("rollout.own_gpus=1",))
