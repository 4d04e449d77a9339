"""The proof that a node and the head reach each other, and what it says of their clocks."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from miles_hpc.node import reach
from miles_hpc.node.network import host_identity
from miles_hpc.node.reach import UnreachableError, prove_reach, serving_reach
from miles_hpc.node.rendezvous import HeadAddress

TOKEN = "a" * 64
HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch):
    monkeypatch.setattr(reach, "_DEADLINE_S", 0.0)


def head_at(port: int, host: str = HOST) -> HeadAddress:
    return HeadAddress(
        attempt="7-0",
        node="n0",
        host=host,
        gcs_port=None,
        reach_port=port,
        host_identity=host_identity(),
    )


@contextlib.contextmanager
def answering(answer):
    """Let `answer` have the first connection; yields the port."""
    with socket.create_server((HOST, 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:
                answer(stream)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_both_ways_are_proved_and_one_clock_has_bounds_around_zero():
    with serving_reach(HOST, TOKEN) as port:
        for _ in range(3):
            least_s, most_s = prove_reach("n1", HOST, head_at(port), TOKEN)
            assert least_s <= 0.0 <= most_s


def test_many_nodes_at_once_are_answered():
    faults = []

    def prove():
        try:
            prove_reach("n1", HOST, head_at(port), TOKEN)
        except UnreachableError as error:
            faults.append(error)

    with serving_reach(HOST, TOKEN) as port:
        threads = [threading.Thread(target=prove) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
    assert not faults


def test_a_clock_that_differs_shows_in_the_bounds(monkeypatch):
    with serving_reach(HOST, TOKEN) as port:
        real = reach.time.time

        class Ahead:
            """Node and head are one process here, so the shift is of the thread that asks."""

            monotonic = staticmethod(reach.time.monotonic)
            sleep = staticmethod(reach.time.sleep)

            @staticmethod
            def time():
                is_node = threading.current_thread() is threading.main_thread()
                return real() + (60.0 if is_node else 0.0)

        monkeypatch.setattr(reach, "time", Ahead)
        least_s, most_s = prove_reach("n1", HOST, head_at(port), TOKEN)
    assert 30.0 < least_s <= 60.0 <= most_s


def test_nothing_there_and_something_else_there_are_told():
    with (
        answering(
            lambda stream: (stream.write(b"SSH-2.0\n"), stream.flush(), stream.read())
        ) as port,
        pytest.raises(UnreachableError, match=rf"n1: network.*{port}.*SSH-2\.0"),
    ):
        prove_reach("n1", HOST, head_at(port), TOKEN)
    with pytest.raises(
        UnreachableError, match=r"(?s)no answer from n0 at 127\.0\.0\.1:\d+.*refused"
    ):
        prove_reach("n1", HOST, head_at(port), TOKEN)


def test_another_attempts_token_is_not_answered():
    with serving_reach(HOST, TOKEN) as port:
        with pytest.raises(UnreachableError, match="closed without an answer"):
            prove_reach("n1", HOST, head_at(port), "b" * 64)
        # The next node is still served.
        prove_reach("n1", HOST, head_at(port), TOKEN)


def test_a_head_that_cannot_connect_back_says_why():
    with socket.create_server((HOST, 0)) as closed:
        nobody = closed.getsockname()[1]
    key = TOKEN.encode()
    with (
        serving_reach(HOST, TOKEN) as port,
        socket.create_connection((HOST, port), timeout=20) as connection,
        connection.makefile("rwb") as stream,
    ):
        reach._write(stream, key, "hello", nonce="1", host=HOST, port=nobody)
        assert reach._read(stream, key, "time")["nonce"] == "1"
        assert "refused" in reach._read(stream, key, "back")["failure"]


def test_a_way_that_only_the_node_can_go_is_told_as_such():
    key = TOKEN.encode()

    def one_way(stream):
        nonce = reach._read(stream, key, "hello")["nonce"]
        reach._write(stream, key, "time", nonce=nonce, time_s=1.0)
        reach._write(stream, key, "back", nonce=nonce, failure="timed out")

    with answering(one_way) as port, pytest.raises(UnreachableError) as raised:
        prove_reach("n1", HOST, head_at(port), TOKEN)
    assert re.search(
        r"n0 does not reach this node at 127\.0\.0\.1: timed out", raised.value.fault.found
    )


def test_a_stranger_that_says_nothing_holds_up_nobody():
    with (
        serving_reach(HOST, TOKEN) as port,
        socket.create_connection((HOST, port), timeout=20),
    ):
        prove_reach("n1", HOST, head_at(port), TOKEN)
    with pytest.raises(UnreachableError, match="refused"):
        prove_reach("n1", HOST, head_at(port), TOKEN)


def test_it_is_tried_again_until_the_deadline_or_until_told_to_stop(monkeypatch):
    monkeypatch.setattr(reach, "_DEADLINE_S", 60.0)
    with socket.create_server((HOST, 0)) as closed:
        nobody = closed.getsockname()[1]
    tries = []

    def check_on():
        tries.append(1)
        if len(tries) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        prove_reach("n1", HOST, head_at(nobody), TOKEN, check_on)


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_reach_each_other_only_over_the_network_that_they_share():
    code = """
import os, subprocess, sys, time
from miles_hpc.node import reach
from miles_hpc.node.rendezvous import HeadAddress
reach._DEADLINE_S = 0.0
reach._CONNECT_TIMEOUT_S = 1.0
node = subprocess.Popen(["unshare", "--net", "sleep", "60"])
def ip(*words, there=False):
    prefix = ["nsenter", "--net", "--target", str(node.pid)] if there else []
    subprocess.run([*prefix, "ip", *" ".join(words).split()], check=True)
try:
    own = os.stat("/proc/self/ns/net").st_ino
    while os.stat(f"/proc/{node.pid}/ns/net").st_ino == own:
        time.sleep(0.01)
    ip("link add v0 type veth peer name v1 netns", str(node.pid))
    ip("addr add 10.9.0.1/24 dev v0"); ip("link set v0 up")
    ip("addr add 10.9.0.2/24 dev v1", there=True); ip("link set v1 up", there=True); ip("link set lo up", there=True)
    ip("addr add 10.8.0.2/32 dev v1", there=True)
    ask = '''
import sys
from miles_hpc.node import reach
from miles_hpc.node.rendezvous import HeadAddress
reach._DEADLINE_S = 0.0
reach._CONNECT_TIMEOUT_S = 1.0
head = HeadAddress(attempt="", node="n0", host="10.9.0.1", gcs_port=None, reach_port=int(sys.argv[1]), host_identity="")
for address in ("10.9.0.2", "10.8.0.2"):
    try:
        reach.prove_reach("n1", address, head, "t")
        print(address, "reached")
    except reach.UnreachableError as error:
        print(address, error.fault.found.partition(", asked")[0])
'''
    with reach.serving_reach("10.9.0.1", "t") as port:
        subprocess.run(["nsenter", "--net", "--target", str(node.pid), sys.executable, "-c", ask, str(port)], check=True, timeout=30)
        print(port)
finally:
    node.kill(); node.wait()
"""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, second, port = done.stdout.split("\n")[:3]
    assert first == "10.9.0.2 reached"
    assert second == f"10.8.0.2 no answer from n0 at 10.9.0.1:{port}"
