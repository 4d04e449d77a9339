"""How what is left of a node's memory is divided between Ray's workers and its object store."""

import pytest

from miles_hpc.node.ray_memory import ray_memory, share_bytes, store_bytes

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("changes", "left", "share"),
    [
        ({}, 10 * GIB, 10 * GIB),
        # Slurm grants it though nothing enforces it: a node without memory cgroups.
        ({"memory_bytes": 4 * GIB}, 10 * GIB, 4 * GIB),
        ({"memory_bytes": 16 * GIB}, 10 * GIB, 10 * GIB),
        ({"cluster": "local", "num_nodes": 2}, 10 * GIB, 5 * GIB),
        ({"cluster": "local", "num_nodes": 2, "memory_bytes": 2 * GIB}, 10 * GIB, 2 * GIB),
    ],
)
def test_a_node_takes_its_share_of_what_is_left(make_context, changes, left, share):
    handoff = make_context(**changes).handoff
    assert share_bytes(handoff, left) == share
    memory = ray_memory(handoff, left)
    assert memory.workers + memory.store == share


@pytest.mark.parametrize(
    ("planned", "left", "store"),
    [
        (16 * GIB, 900 * GIB, 16 * GIB),
        (16 * GIB, 40 * GIB, 12 * GIB),
        (128 * MIB, 500 * MIB, 128 * MIB),
        (128 * MIB, 200 * MIB, 75 * MIB),
    ],
)
def test_the_object_store_is_the_plans_or_less_where_memory_is_short(
    make_context, planned, left, store
):
    handoff = make_context(object_store_bytes=planned).handoff
    assert store_bytes(handoff, left) == ray_memory(handoff, left).store == store
