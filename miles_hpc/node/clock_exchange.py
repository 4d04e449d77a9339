"""The head's clock over a connection: proves that a node reaches the head's address, and bounds the difference of the clocks.

    node                         head
    connect at t0  ----------->  accept
    read at t1     <-----------  its time h          so h was true at some moment between t0 and t1

Serves anybody who connects: it tells the time and nothing else.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

_TIMEOUT_S = 5.0
_LINE_BYTES = 64


@contextlib.contextmanager
def serving_clock(host: str) -> Iterator[int]:
    """Tell this host's time to whoever connects to `host`; yields the port. Raises OSError."""
    with socket.create_server((host, 0), backlog=1024) as server:
        server.settimeout(0.1)
        is_over = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, is_over), daemon=True)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            is_over.set()
            thread.join()


def _serve(server: socket.socket, is_over: threading.Event) -> None:
    while not is_over.is_set():
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                connection.sendall(f"{time.time()!r}\n".encode())


def ask_clock(host: str, port: int) -> tuple[float, float]:
    """Return the least and the most that this node's clock is ahead of the one at host:port.

    Raises:
        OSError: if nothing answers there with a time.
    """
    t0 = time.time()
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
        text = b""
        while not text.endswith(b"\n") and len(text) < _LINE_BYTES:
            part = connection.recv(_LINE_BYTES)
            if not part:
                break
            text += part
    t1 = time.time()
    try:
        head_s = float(text)
    except ValueError as error:
        raise OSError(f"{host}:{port} answered {text!r} and not with a time") from error
    return t0 - head_s, t1 - head_s
