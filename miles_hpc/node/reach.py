"""Proves that a node and the head reach each other at the addresses they announce, and bounds the difference of their clocks.

    node                                head
    connect at t0  ------------------>  accept
    hello: my address and port ------>  is this one of ours?
    read at t1     <------------------  its time h          so h was true at some moment between t0 and t1
    accept         <==================  connect to that address and port
    who I am       ==================>  is this the node that said hello?
    read           <------------------  reached, or why not

Every line is signed with the attempt's token, so a stranger learns nothing and cannot send the head anywhere. A connection
that fails is tried again until the deadline: a host may be slow, and a switch may still learn the way.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import BufferedIOBase

from miles_hpc.errors import Fault
from miles_hpc.node.rendezvous import HeadAddress

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 15.0
_DEADLINE_S = 30.0
_PAUSE_S = 0.05
_LINE_BYTES = 4096


class UnreachableError(Exception):
    """A node and the head do not reach each other; `fault` says which way fails."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


@contextlib.contextmanager
def serving_reach(host: str, token: str) -> Iterator[int]:
    """Answer the nodes that prove their way to `host`; yields the port. Raises OSError."""
    key = token.encode()

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 1024
        daemon_threads = True
        # A stranger that connects and says nothing must not hold up the job.
        block_on_close = False

    class Handler(socketserver.StreamRequestHandler):
        timeout = _ANSWER_TIMEOUT_S

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                _answer(self.rfile, self.wfile, key)

    with Server((host, 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True
        )
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def _answer(reader: BufferedIOBase, writer: BufferedIOBase, key: bytes) -> None:
    hello = _read(reader, key, "hello")
    nonce = str(hello["nonce"])
    _write(writer, key, "time", nonce=nonce, time_s=time.time())
    address = (str(hello["host"]), int(str(hello["port"])))
    failure = None
    try:
        with (
            socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S) as back,
            back.makefile("rwb") as stream,
        ):
            if _read(stream, key, "node")["nonce"] != nonce:
                failure = "another process answers there"
    except OSError as error:
        failure = str(error)
    _write(writer, key, "back", nonce=nonce, failure=failure)


def prove_reach(
    node: str,
    address: str,
    head: HeadAddress,
    token: str,
    check_on: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Prove both ways between a node and the head; return the least and the most that its clock is ahead, in seconds.

    Args:
        node: name of this node, for the error.
        address: IPv4 address that this node announces.
        head: what the head has published.
        token: the attempt's secret, which the head has too.
        check_on: called between tries; raises to give up early.

    Raises:
        UnreachableError: with the way that fails and its last error.
    """
    end_s = time.monotonic() + _DEADLINE_S
    while True:
        check_on()
        try:
            bounds, failure = _try(address, head, token.encode())
        except OSError as error:
            fault = Fault(
                where=f"{node}: network",
                found=f"no answer from {head.node} at {head.host}:{head.reach_port}, asked from {address}: {error}",
                expected="a connection to the head's address",
                fix="Open the network between the nodes, or set network.interface to one that they share.",
            )
        else:
            if failure is None:
                return bounds
            fault = Fault(
                where=f"{node}: network",
                found=f"{head.node} does not reach this node at {address}: {failure}",
                expected="a connection from the head, as Ray makes one",
                fix="Open the ports of the nodes to each other, or set network.interface to an interface that they share.",
            )
        if time.monotonic() > end_s:
            raise UnreachableError(fault)
        time.sleep(_PAUSE_S)


def _try(address: str, head: HeadAddress, key: bytes) -> tuple[tuple[float, float], str | None]:
    nonce = secrets.token_hex(16)
    with socket.create_server((address, 0)) as server:
        server.settimeout(_ANSWER_TIMEOUT_S)
        port = server.getsockname()[1]
        t0 = time.time()
        with (
            socket.create_connection(
                (head.host, head.reach_port),
                timeout=_CONNECT_TIMEOUT_S,
                source_address=(address, 0),
            ) as connection,
            connection.makefile("rwb") as stream,
        ):
            connection.settimeout(_ANSWER_TIMEOUT_S)
            _write(stream, key, "hello", nonce=nonce, host=address, port=port)
            stamp = _read(stream, key, "time")
            t1 = time.time()
            if stamp["nonce"] != nonce:
                raise OSError("an answer to another question")
            with _answering_back(server, key, nonce):
                verdict = _read(stream, key, "back")
    head_s = float(str(stamp["time_s"]))
    failure = verdict["failure"]
    return (t0 - head_s, t1 - head_s), None if failure is None else str(failure)


@contextlib.contextmanager
def _answering_back(server: socket.socket, key: bytes, nonce: str) -> Iterator[None]:
    """Say who this node is to everybody who connects to `server`."""
    is_over = threading.Event()
    server.settimeout(0.1)

    def serve() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection, connection.makefile("wb") as stream:
                    connection.settimeout(_CONNECT_TIMEOUT_S)
                    _write(stream, key, "node", nonce=nonce)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _write(stream: BufferedIOBase, key: bytes, kind: str, **fields: object) -> None:
    text = json.dumps({"kind": kind, **fields})
    stream.write(json.dumps({"text": text, "mac": _mac(key, text)}).encode() + b"\n")
    stream.flush()


def _read(stream: BufferedIOBase, key: bytes, kind: str) -> Mapping[str, object]:
    """Return the next line's fields. Raises OSError for a line that is not one of this attempt's."""
    line = stream.readline(_LINE_BYTES)
    if not line:
        raise OSError("the connection was closed without an answer")
    try:
        outer = json.loads(line)
        text, mac = str(outer["text"]), str(outer["mac"])
        if not hmac.compare_digest(mac.encode(), _mac(key, text).encode()):
            raise ValueError("signed with another token")
        fields = json.loads(text)
        if fields["kind"] != kind:
            raise ValueError(f"{fields['kind']} in place of {kind}")
    except (ValueError, KeyError, TypeError) as error:
        raise OSError(f"something else answers there: {line[:64]!r} ({error})") from error
    return dict(fields)


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
