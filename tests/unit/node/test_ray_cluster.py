"""Ray's command line on head and workers, and who counts as missing."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from miles_hpc.node.network import Interface
from miles_hpc.node.ray_cluster import (
    Membership,
    NodeState,
    RaySettings,
    missing_from,
    num_cpus,
    ray_start_argv,
    watch_membership,
)
from miles_hpc.node.ray_memory import RayMemory
from miles_hpc.node.supervise import start_reporter


def settings(*, client_server: bool = False) -> RaySettings:
    return RaySettings(
        environ={},
        interface=Interface(name="lo", address="127.0.0.1"),
        temp=Path("/tmp/mhpc-0/abc"),
        memory=RayMemory(workers=400 << 20, store=80 << 20),
        client_server=client_server,
    )


def options(argv) -> dict[str, str]:
    return dict(word.lstrip("-").partition("=")[::2] for word in argv if word.startswith("--"))


def test_the_head_lets_ray_choose_its_port_and_opens_no_dashboard(make_context):
    context = make_context()
    found = options(ray_start_argv(context.handoff, context.identity, settings(), None))
    assert found["port"] == "0"
    assert found["include-dashboard"] == "false"
    assert "address" not in found
    assert json.loads(found["resources"]) == {"miles_hpc_node_0": 1}
    assert (found["num-cpus"], found["num-gpus"]) == ("4", "0")
    assert (found["memory"], found["object-store-memory"]) == (str(400 << 20), str(80 << 20))


def test_a_dashboard_listens_on_loopback_alone(make_context):
    context = make_context(dashboard=True)
    asked = replace(settings(), dashboard_port=4711)
    found = options(ray_start_argv(context.handoff, context.identity, asked, None))
    assert found["include-dashboard"] == "true"
    assert (found["dashboard-host"], found["dashboard-port"]) == ("127.0.0.1", "4711")


def test_no_port_has_a_fixed_default(make_context):
    context = make_context()
    argv = ray_start_argv(context.handoff, context.identity, settings(client_server=True), None)
    found = options(argv)
    assert (found["min-worker-port"], found["max-worker-port"]) == ("0", "0")
    assert found["dashboard-agent-listen-port"] == "0"
    assert found["ray-client-server-port"] not in ("10001", "0")


def test_a_worker_joins_under_its_own_resource(make_context):
    context = make_context(2)
    argv = ray_start_argv(context.handoff, context.identity, settings(), "10.0.0.1:7")
    found = options(argv)
    assert found["address"] == "10.0.0.1:7"
    assert json.loads(found["resources"]) == {"miles_hpc_node_2": 1}
    assert not {"head", "port", "include-dashboard"} & set(found)


def test_no_secret_is_on_the_command_line(make_context):
    context = make_context()
    context.rendezvous.open()
    token = context.rendezvous.token.read_text()
    argv = ray_start_argv(context.handoff, context.identity, settings(), None)
    assert token not in " ".join(argv)


def test_cpus_default_to_this_process_or_its_share(make_context):
    usable = num_cpus(make_context(cpus_per_node=None).handoff)
    assert usable >= 1
    shared = num_cpus(make_context(cpus_per_node=None, cluster="local").handoff)
    assert shared == max(1, usable // 3)
    assert num_cpus(make_context(cpus_per_node=7).handoff) == 7


def test_missing_nodes_are_named_with_what_they_lack(make_context):
    context = make_context(gpus_per_node=8)
    nodes = {
        0: NodeState(index=0, alive=True, cpus=4, gpus=8, why=""),
        1: NodeState(index=1, alive=True, cpus=4, gpus=3, why=""),
    }
    assert missing_from(context.handoff, context.identity, nodes) == (
        "n2 (3 of 8 GPUs)", "n3 (not in Ray)",
    )  # fmt: skip
    nodes[1] = NodeState(index=1, alive=True, cpus=1, gpus=8, why="")
    nodes[2] = NodeState(index=2, alive=False, cpus=0, gpus=0, why="gone")
    assert missing_from(context.handoff, context.identity, nodes) == (
        "n2 (1 of 4 CPUs)", "n3 (not in Ray)",
    )  # fmt: skip
    whole = {i: NodeState(index=i, alive=True, cpus=4, gpus=8, why="") for i in range(3)}
    assert missing_from(context.handoff, context.identity, whole) == ()


def test_the_probe_waits_for_the_address_and_reads_it_whole(tmp_path):
    source = "import json; print(json.dumps({'nodes': [dict(index=0, alive=True, cpus=1, gpus=0, why=input())]}))"
    probe, reader = start_reporter(
        "ray_watch", [sys.executable, "-c", source], environ={}, log=tmp_path / "log"
    )
    membership = Membership(probe=probe, reader=reader)
    membership.refresh()
    assert membership.nodes == {}
    membership.follow("127.0.0.1:6379")
    assert probe.process.wait(timeout=60) == 0
    membership.refresh()
    assert membership.nodes[0].why == "127.0.0.1:6379"


def test_a_probe_that_has_ended_is_told_nothing(tmp_path):
    argv = [sys.executable, "-c", ""]
    probe, reader = start_reporter("ray_watch", argv, environ={}, log=tmp_path / "log")
    probe.process.wait(timeout=60)
    Membership(probe=probe, reader=reader).follow("127.0.0.1:6379")


def test_a_probe_whose_agent_is_gone_ends_without_an_address(make_context):
    context = make_context(python=sys.executable)
    context.log.parent.mkdir(parents=True, exist_ok=True)
    membership = watch_membership(context, replace(settings(), environ=dict(os.environ)))
    membership.probe.process.stdin.close()
    assert membership.probe.process.wait(timeout=120) == 0, membership.probe.log_tail()
