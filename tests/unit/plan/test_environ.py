"""The environment table: what it holds on each device, who wins, and that nothing lacks its reason."""

import pytest

from miles_hpc.plan.environ import (
    ALLOCATOR,
    is_plain_interface,
    make_environment,
)
from tests.unit.plan.specs import GLM52, NATIVE, spec_of

CPU = {"cluster.device": "cpu", "cluster.gpus_per_node": 0}


def values(spec):
    return {variable.name: variable.value for variable in make_environment(spec)}


@pytest.mark.parametrize("changes", [{}, {**NATIVE, **CPU}, GLM52])
def test_every_variable_has_a_reason_and_a_source_and_stands_once(changes):
    table = make_environment(spec_of(changes))
    names = [variable.name for variable in table]
    assert len(names) == len(set(names))
    assert all(variable.why.strip() and variable.source.strip() for variable in table)


def test_gpu_jobs_get_an_allocator_that_can_be_paused():
    table = values(spec_of())
    assert table["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR
    assert "expandable_segments" not in ALLOCATOR
    assert table["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "OMP_NUM_THREADS" not in table


def test_cpu_jobs_get_threads_and_see_no_gpu():
    table = values(spec_of(NATIVE, CPU, {"engine.native.threads_per_rank": 3}))
    assert table["OMP_NUM_THREADS"] == "3"
    assert table["CUDA_VISIBLE_DEVICES"] == ""
    assert not any(name.startswith(("NCCL_", "PYTORCH_")) for name in table)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_allocator_replaces_ours_under_either_name(name):
    table = make_environment(spec_of(env={name: "max_split_size_mb:256"}))
    allocators = [variable for variable in table if variable.name.startswith("PYTORCH_")]
    assert [(v.name, v.value, v.source) for v in allocators] == [
        (name, "max_split_size_mb:256", "spec")
    ]


def test_the_users_variables_come_last_with_source_spec():
    table = make_environment(spec_of(env={"B": "2", "A": "1"}))
    assert [(v.name, v.value, v.source) for v in table[-2:]] == [
        ("B", "2", "spec"),
        ("A", "1", "spec"),
    ]
    assert all(v.source != "spec" for v in table[:-2])


def test_a_plain_interface_is_exact_for_nccl_and_bare_for_gloo():
    table = values(spec_of(network__interface="ib0", network__ib_hca="mlx5", nccl__debug="WARN"))
    assert table["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert table["GLOO_SOCKET_IFNAME"] == "ib0"
    assert table["NCCL_IB_HCA"] == "mlx5"
    assert table["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize("pattern", ["^lo,docker", "=eth0", "eth0,eth1", "10.1.0.0/16"])
def test_a_pattern_is_left_to_the_node(pattern):
    assert not is_plain_interface(pattern)
    table = values(spec_of(network__interface=pattern))
    assert "GLOO_SOCKET_IFNAME" not in table
    assert "NCCL_SOCKET_IFNAME" not in table
