"""The head's clock over a connection."""

import socket
import threading

import pytest

from miles_hpc.node import clock_exchange
from miles_hpc.node.clock_exchange import ask_clock, serving_clock


def test_two_processes_of_one_clock_have_bounds_around_zero():
    with serving_clock("127.0.0.1") as port:
        for _ in range(3):
            least_s, most_s = ask_clock("127.0.0.1", port)
            assert least_s <= 0.0 <= most_s


def test_a_clock_that_differs_shows_in_the_bounds(monkeypatch):
    with serving_clock("127.0.0.1") as port:
        real = clock_exchange.time.time

        class Ahead:
            """Node and head are one process here, so the shift is of the thread that asks."""

            @staticmethod
            def time():
                is_node = threading.current_thread() is threading.main_thread()
                return real() + (60.0 if is_node else 0.0)

        monkeypatch.setattr(clock_exchange, "time", Ahead)
        least_s, most_s = ask_clock("127.0.0.1", port)
    assert least_s <= 60.0 <= most_s
    assert least_s > 30.0


def test_nothing_there_and_something_else_there_are_errors():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="not with a time"):
            ask_clock("127.0.0.1", port)
        thread.join(timeout=10)
    with pytest.raises(OSError, match="refused"):
        ask_clock("127.0.0.1", port)


def test_the_port_is_closed_afterwards():
    with serving_clock("127.0.0.1") as port:
        ask_clock("127.0.0.1", port)
    with pytest.raises(OSError, match="refused"):
        ask_clock("127.0.0.1", port)
