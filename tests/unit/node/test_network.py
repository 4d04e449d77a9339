"""Which interface a node announces, without a DNS and without guessing."""

import socket

import pytest

from miles_hpc.errors import PreflightError
from miles_hpc.node import network
from miles_hpc.node.network import Interface, choose_interface, free_port, is_reachable
from miles_hpc.slurm import NodeIdentity


def identity(cluster: str = "local", num_nodes: int = 2) -> NodeIdentity:
    nodes = tuple(f"n{number}" for number in range(num_nodes))
    return NodeIdentity(
        cluster=cluster, job_id="7", restart_count=0, node="n0", node_index=0, nodes=nodes
    )


def test_a_named_interface_decides_and_a_missing_one_is_an_error():
    loopback = next(entry for entry in network.list_interfaces() if entry.name == "lo")
    assert choose_interface(identity(), "lo", None) == loopback
    with pytest.raises(PreflightError, match="no interface nope7"):
        choose_interface(identity(), "nope7", None)


def test_the_way_to_the_head_decides_on_the_other_nodes():
    assert choose_interface(identity(), None, "127.0.0.1").name == "lo"


def test_slurms_own_address_is_taken_but_not_debians_127_0_1_1(tmp_path, monkeypatch):
    interfaces = (
        Interface(name="lo", address="127.0.0.1"),
        Interface(name="ib0", address="10.1.0.5"),
        Interface(name="eth0", address="192.168.0.5"),
    )
    monkeypatch.setattr(network, "list_interfaces", lambda: interfaces)
    monkeypatch.setattr(network, "source_address", lambda target: "192.168.0.5")
    program = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for address, name in (("10.1.0.5", "ib0"), ("127.0.1.1", "eth0"), ("127.0.0.1", "eth0")):
        program.write_text(f"#!/bin/sh\necho NodeName=n0 NodeAddr={address}\n")
        program.chmod(0o755)
        assert choose_interface(identity("slurm"), None, None).name == name
    assert choose_interface(identity("slurm"), "^eth,lo", None).name == "ib0"


def test_several_addresses_without_a_reason_for_one_are_an_error(monkeypatch):
    interfaces = (Interface(name="a", address="10.0.0.1"), Interface(name="b", address="10.1.0.1"))
    monkeypatch.setattr(network, "list_interfaces", lambda: interfaces)
    monkeypatch.setattr(network, "source_address", lambda target: None)
    with pytest.raises(PreflightError, match=r"a 10\.0\.0\.1, b 10\.1\.0\.1"):
        choose_interface(identity(), None, None)


def test_ports_are_really_free_and_reachability_is_really_tried():
    port = free_port("127.0.0.1")
    assert not is_reachable("127.0.0.1", port, timeout_s=0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert is_reachable("127.0.0.1", port, timeout_s=0.5)
