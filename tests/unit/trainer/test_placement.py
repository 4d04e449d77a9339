import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_hpc.plan.plan import Layout
from miles_hpc.trainer.placement import find_shortages, make_bundles, node_resource


def layout(num_nodes, ranks_per_node, gpus_per_node=0):
    world = num_nodes * ranks_per_node
    return Layout(
        world_size=world,
        tp=1,
        pp=1,
        cp=1,
        ep=1,
        etp=1,
        dp=world,
        edp=world,
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        ranks_per_node=ranks_per_node,
    )


def node(index, **resources):
    return {node_resource(index): 1.0, **{k: float(v) for k, v in resources.items()}}


def test_ranks_fill_the_nodes_in_order_and_each_bundle_is_pinned_to_its_node():
    bundles = make_bundles(layout(2, 2), cpus_per_rank=3)
    assert [bundle.node_index for bundle in bundles] == [0, 0, 1, 1]
    assert bundles[3].resources() == {"CPU": 3.0, "miles_hpc_node_1": 0.001}


def test_a_bundle_asks_for_one_gpu_exactly_where_nodes_have_gpus():
    bundle = make_bundles(layout(1, 8, gpus_per_node=8), cpus_per_rank=1)[7]
    assert bundle.resources() == {"CPU": 1.0, "GPU": 1.0, "miles_hpc_node_0": 0.001}


@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 4))
def test_nodes_with_exactly_what_is_needed_have_no_shortage(num_nodes, ranks, cpus):
    bundles = make_bundles(layout(num_nodes, ranks), cpus_per_rank=cpus)
    nodes = [node(index, CPU=ranks * cpus) for index in range(num_nodes)]
    assert find_shortages(bundles, nodes) == ()


def test_every_shortage_is_told_with_its_arithmetic_and_ranks():
    bundles = make_bundles(layout(3, 60), cpus_per_rank=1)
    shortages = find_shortages(bundles, [node(0, CPU=2), node(2, CPU=60)])
    assert len(shortages) == 2
    assert "60 bundles * 1 CPU = 60 CPU, but has 2" in shortages[0]
    assert shortages[1].startswith("node 1 (ranks 60")
    assert "not in the Ray cluster" in shortages[1]


@pytest.mark.parametrize("gpus", [0, 3])
def test_a_node_with_too_few_gpus_is_named(gpus):
    bundles = make_bundles(layout(2, 4, gpus_per_node=4), cpus_per_rank=1)
    shortages = find_shortages(bundles, [node(0, CPU=8, GPU=4), node(1, CPU=8, GPU=gpus)])
    assert shortages == (
        f"node 1 (ranks 4, 5, 6, 7) needs 4 bundles * 1 GPU = 4 GPU, but has {gpus}",
    )
