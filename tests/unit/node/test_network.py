"""Which interface a node announces, without a DNS and without guessing."""

import os
import socket
import subprocess
import sys

import pytest

from miles_hpc.errors import PreflightError
from miles_hpc.node import network
from miles_hpc.node.network import (
    Interface,
    choose_interface,
    free_port,
    host_identity,
    is_reachable,
    list_interfaces,
    nccl_interface,
    select_interfaces,
)
from miles_hpc.node.rendezvous import HeadAddress
from miles_hpc.slurm import NodeIdentity

LO = Interface(name="lo", address="127.0.0.1")
IB0 = Interface(name="ib0", address="10.1.0.5")
IB1 = Interface(name="ib1", address="10.1.1.5")
ETH1 = Interface(name="eth1", address="192.168.0.5")
ETH10 = Interface(name="eth10", address="192.168.7.5")
DOCKER = Interface(name="docker0", address="172.17.0.1")
ALL = (LO, ETH1, ETH10, IB0, IB1, DOCKER)


def identity(cluster: str = "slurm", num_nodes: int = 2) -> NodeIdentity:
    nodes = tuple(f"n{number}" for number in range(num_nodes))
    return NodeIdentity(
        cluster=cluster, job_id="7", restart_count=0, node="n0", node_index=0, nodes=nodes
    )


def head_at(host: str, *, is_here: bool = False) -> HeadAddress:
    return HeadAddress(
        attempt="7-0",
        node="n9",
        host=host,
        gcs_port=1,
        reach_port=2,
        host_identity=host_identity() if is_here else "another boot/1",
    )


@pytest.fixture
def a_node(monkeypatch):
    """Return a function that says which interfaces this node has, which address Slurm tells and where the routes lead."""

    def become(*interfaces: Interface, slurm: str | None = None, way: str | None = None) -> None:
        monkeypatch.setattr(network, "list_interfaces", lambda: interfaces)
        monkeypatch.setattr(network, "ask_node_address", lambda node: slurm)
        monkeypatch.setattr(network, "source_address", lambda target: way)

    return become


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, ["lo", "eth1", "eth10", "ib0", "ib1", "docker0"]),
        ("eth1", ["eth1"]),
        ("eth", []),
        ("ib,eth", ["ib0", "ib1", "eth1", "eth10"]),
        ("=ib1,eth1", ["ib1", "eth1"]),
        ("^lo,docker", ["eth1", "eth10", "ib0", "ib1"]),
        ("^=lo,eth1", ["eth10", "ib0", "ib1", "docker0"]),
        ("10.1.0.0/16", ["ib0", "ib1"]),
        ("10.1.1.5/32", ["ib1"]),
        ("10.1.1.9/24", ["ib1"]),
    ],
)
def test_every_form_of_the_key_admits_what_it_says(wanted, names):
    assert [interface.name for interface in select_interfaces(wanted, ALL)] == names


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        ("ib0", "=ib0"),
        ("10.1.0.0/16", "=ib0"),
        ("ib,eth", "ib,eth"),
        ("=ib0", "=ib0"),
        ("^lo,docker", "^lo,docker"),
    ],
)
def test_nccl_gets_its_own_form_or_one_whole_name(wanted, value):
    assert nccl_interface(wanted, IB0) == value


def test_a_named_interface_decides_and_a_missing_one_is_an_error_with_what_is_there(a_node):
    a_node(LO, ETH1, IB0, slurm="192.168.0.5", way="192.168.0.5")
    assert choose_interface(identity(), "ib0", None) == IB0
    with pytest.raises(PreflightError) as raised:
        choose_interface(identity(), "nope7", None)
    assert "n0: network" in str(raised.value)
    assert "nope7" in str(raised.value)
    assert "eth1 192.168.0.5, ib0 10.1.0.5" in str(raised.value)


def test_an_interface_that_is_down_is_never_chosen_but_told(a_node):
    down = Interface(name="ib0", address="10.1.0.5", is_up=False)
    a_node(LO, ETH1, down, slurm="10.1.0.5", way=None)
    assert choose_interface(identity(), None, None) == ETH1
    with pytest.raises(PreflightError, match=r"ib0 10\.1\.0\.5 \(down\)"):
        choose_interface(identity(), "ib0", None)


def test_the_way_to_the_head_decides_among_what_the_key_admits(a_node):
    a_node(*ALL, slurm="192.168.0.5", way="10.1.1.5")
    assert choose_interface(identity(), None, head_at("10.1.1.1")) == IB1
    assert choose_interface(identity(), "10.1.0.0/16", head_at("10.1.1.1")) == IB1
    assert choose_interface(identity(), "ib0,ib1", head_at("10.1.1.1")) == IB1
    # What the key says stands, whatever the route: the connection that is tried next tells whether it works.
    assert choose_interface(identity(), "eth1", head_at("10.1.1.1")) == ETH1


def test_on_the_head_the_first_of_a_list_wins_over_slurms_address(a_node):
    a_node(*ALL, slurm="192.168.0.5", way="192.168.0.5")
    assert choose_interface(identity(), "ib,eth", None) == IB0
    assert choose_interface(identity(), "=eth10,eth1", None) == ETH10
    assert choose_interface(identity(), None, None) == ETH1


def test_slurms_own_address_is_taken_but_not_debians_127_0_1_1(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "list_interfaces", lambda: (LO, IB0, ETH1))
    monkeypatch.setattr(network, "source_address", lambda target: "192.168.0.5")
    program = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for address, name in (("10.1.0.5", "ib0"), ("127.0.1.1", "eth1"), ("127.0.0.1", "eth1")):
        program.write_text(f"#!/bin/sh\necho NodeName=n0 NodeAddr={address}\n")
        program.chmod(0o755)
        assert choose_interface(identity(), None, None).name == name
    assert choose_interface(identity(), "^eth,lo", None).name == "ib0"


def test_several_addresses_without_a_reason_for_one_are_an_error(a_node):
    a_node(LO, IB0, ETH1)
    with pytest.raises(PreflightError, match=r"ib0 10\.1\.0\.5, eth1 192\.168\.0\.5"):
        choose_interface(identity(), None, None)


def test_loopback_serves_where_nothing_else_is_but_never_between_hosts(a_node):
    a_node(LO, way="127.0.0.1")
    assert choose_interface(identity(), None, None) == LO
    assert choose_interface(identity(), None, head_at("127.0.0.1", is_here=True)) == LO
    with pytest.raises(PreflightError, match="n9 on another host"):
        choose_interface(identity(), None, head_at("10.1.0.1"))
    with pytest.raises(PreflightError, match="n9 on another host"):
        choose_interface(identity(), "lo", head_at("127.0.0.1"))


def test_a_head_that_announces_loopback_is_not_believed_on_another_host(a_node):
    a_node(LO, ETH1, way="127.0.0.1")
    with pytest.raises(PreflightError, match=r"announces 127\.0\.0\.1, which is this host itself"):
        choose_interface(identity(), None, head_at("127.0.0.1"))


def test_a_node_without_any_interface_says_so(a_node):
    a_node(way=None)
    with pytest.raises(PreflightError, match="no interface with an IPv4 address"):
        choose_interface(identity(), None, None)


def test_this_hosts_loopback_is_listed_and_up():
    loopback = [entry for entry in list_interfaces() if entry.name == "lo"]
    assert Interface(name="lo", address="127.0.0.1", is_up=True) in loopback
    assert all(entry.is_loopback for entry in loopback)


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_every_address_of_an_interface_is_listed_and_a_down_one_is_told_apart():
    code = """
import subprocess
from miles_hpc.node.network import host_identity, list_interfaces
for line in ("link add d0 type veth peer name d1", "link set d0 up", "link set d1 up", "addr add 10.9.0.1/24 dev d0", "addr add 10.9.0.2/24 dev d0",
             "addr add 10.8.0.1/24 dev lo"):
    subprocess.run(["ip", *line.split()], check=True)
print(sorted((i.name, i.address, i.is_up) for i in list_interfaces()))
print(host_identity())
"""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    listed, identity_there = done.stdout.splitlines()
    assert listed == str(
        [("d0", "10.9.0.1", True), ("d0", "10.9.0.2", True), ("lo", "10.8.0.1", False)]
    )
    assert identity_there != host_identity()
    assert identity_there.split("/")[0] == host_identity().split("/")[0]


def test_ports_are_really_free_and_reachability_is_really_tried():
    port = free_port("127.0.0.1")
    assert not is_reachable("127.0.0.1", port, timeout_s=0.5)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert is_reachable("127.0.0.1", port, timeout_s=0.5)
