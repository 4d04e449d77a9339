"""The ranks' rendezvous: a port that nobody can take, on one address alone."""

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from miles_hpc.trainer.grid import join_rendezvous, open_rendezvous

pytestmark = pytest.mark.timeout(60)

ADDRESS = "127.0.0.9"


def listening_on(port: int) -> set[str]:
    """Return the addresses, as /proc/net writes them, at which something listens on `port`."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]
    ]
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")
    }


def test_the_port_is_held_from_the_moment_it_is_known():
    store = open_rendezvous(ADDRESS, 2, 10.0)
    with socket.socket() as thief, pytest.raises(OSError, match="in use"):
        thief.bind((ADDRESS, store.port))


def test_it_listens_where_the_ranks_look_and_nowhere_else():
    store = open_rendezvous(ADDRESS, 2, 10.0)
    assert listening_on(store.port) == {"0900007F"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", store.port), timeout=5)


def test_a_rank_that_joins_sees_what_the_first_has_set():
    store = open_rendezvous(ADDRESS, 2, 10.0)
    other = join_rendezvous(ADDRESS, store.port, 2, 10.0)
    store.set("from", "the first")
    assert other.get("from") == b"the first"


def test_a_first_rank_that_is_gone_is_an_error_at_the_deadline():
    with socket.create_server((ADDRESS, 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(dist.DistError, match=f"{ADDRESS}.*{port}|{port}"):
        join_rendezvous(ADDRESS, port, 2, 1.0)
