"""The HTTP server answers with bounded descriptors, memory and threads, whatever its clients do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from grpo_run.dashboards.metrics import http_server
from grpo_run.dashboards.metrics.address import listen
from grpo_run.dashboards.metrics.http_server import HttpResponse, HttpServer, Request, parse_head

DEADLINE_SECONDS = 20.0
REQUEST = b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Served:
    """A server in a thread, and its clients."""

    def __init__(self, respond: Callable[[Request], HttpResponse], max_connections: int) -> None:
        listening = listen("127.0.0.1", 0)
        self.address = listening.getsockname()
        self.server = HttpServer(listening, respond, max_connections=max_connections)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        self.clients: list[socket.socket] = []

    def connect(self) -> socket.socket:
        """Connect a client, which is closed with the server."""
        client = socket.create_connection(self.address, timeout=DEADLINE_SECONDS)
        self.clients.append(client)
        return client

    def get(self, request: bytes = REQUEST) -> bytes:
        """Send one request and return the whole answer."""
        client = self.connect()
        client.sendall(request)
        return read_all(client)

    def close(self) -> None:
        """Stop the server."""
        self.server.stop()
        self.thread.join(DEADLINE_SECONDS)
        assert not self.thread.is_alive()
        for client in self.clients:
            client.close()


def read_all(client: socket.socket) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    while data := client.recv(65536):
        received += data
    return received


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers that answer with the path; they are stopped after the test."""
    started: list[Served] = []

    def begin(
        respond: Callable[[Request], HttpResponse] = lambda request: HttpResponse(body=request.path.encode()),
        max_connections: int = 4,
    ) -> Served:
        started.append(Served(respond, max_connections))
        return started[-1]

    yield begin
    for served in started:
        served.close()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for the server's threads."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def status_of(answer: bytes) -> int:
    """Return the status of an answer."""
    return int(answer.split(b" ")[1])


def test_an_answer_has_its_length_and_ends_the_connection(serve: Callable[..., Served]) -> None:
    """The client sees the end of the body."""
    head, _, body = serve().get().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 5" in head
    assert b"connection: close" in head
    assert body == b"/page"


def test_silent_connections_do_not_keep_others_out(serve: Callable[..., Served]) -> None:
    """The oldest silent ones are closed; their number is never above the limit."""
    served = serve(max_connections=4)
    served.get()  # the server's own descriptors are open now
    before = len(os.listdir("/proc/self/fd"))
    silent = [served.connect() for _ in range(300)]
    assert status_of(served.get()) == 200
    for client in silent[:200]:
        assert client.recv(1) == b""
    assert len(os.listdir("/proc/self/fd")) <= before + 301 + 4  # those of this test, and the limit
    assert status_of(served.get()) == 200


def test_a_silent_connection_is_closed_after_its_time(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has sent a part of a request."""
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.2)
    served = serve()
    client = served.connect()
    client.sendall(b"GET /page HT")
    assert client.recv(1) == b""


def test_a_request_in_pieces_is_answered(serve: Callable[..., Served]) -> None:
    """A slow network is not an attack."""
    client = serve().connect()
    for part in (REQUEST[:10], REQUEST[10:30], REQUEST[30:]):
        client.sendall(part)
        time.sleep(0.02)
    assert status_of(read_all(client)) == 200


def test_a_client_that_half_closes_gets_its_answer(serve: Callable[..., Served]) -> None:
    """As netcat does after sending its input."""
    client = serve().connect()
    client.sendall(REQUEST)
    client.shutdown(socket.SHUT_WR)
    assert status_of(read_all(client)) == 200


def test_a_request_without_end_is_refused(serve: Callable[..., Served]) -> None:
    """No more than the limit is kept."""
    answer = serve().get(b"GET /page HTTP/1.1\r\nx: " + b"y" * 2 * http_server.MAX_HEAD_BYTES)
    assert status_of(answer) == 400


@pytest.mark.parametrize(
    "request_bytes", [b"\r\n\r\n", b"hello\r\n\r\n", b"GET /page SPDY/3\r\n\r\n", b"\xff\r\n\r\n"]
)
def test_what_is_not_http_is_refused(serve: Callable[..., Served], request_bytes: bytes) -> None:
    """In one line."""
    answer = serve().get(request_bytes)
    assert status_of(answer) == 400
    assert answer.endswith(b"\r\n\r\nnot an HTTP request\n")


def test_an_exception_is_answered_and_the_server_goes_on(serve: Callable[..., Served]) -> None:
    """Status 500 in one line."""

    def respond(request: Request) -> HttpResponse:
        if request.path == "/page":
            raise KeyError("rank")
        return HttpResponse(body=b"fine")

    served = serve(respond)
    with capture_logs() as logs:
        answer = served.get()
    assert status_of(answer) == 500
    assert answer.endswith(b"KeyError: 'rank'\n")
    assert [entry["event"] for entry in logs] == ["metrics_request_failed"]
    assert served.get(REQUEST.replace(b"/page", b"/other")).endswith(b"fine")


def test_a_large_answer_arrives_whole(serve: Callable[..., Served]) -> None:
    """It does not fit into the socket's buffer."""
    body = bytes(range(256)) * 40_000
    answer = serve(lambda request: HttpResponse(body=body)).get()
    assert answer.partition(b"\r\n\r\n")[2] == body


def test_a_client_that_does_not_read_is_closed(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a few of them would occupy the server."""
    monkeypatch.setattr(http_server, "WRITE_SECONDS", 0.2)
    served = serve(lambda request: HttpResponse(body=bytes(20_000_000)), max_connections=2)
    for _ in range(2):
        client = served.connect()
        client.sendall(REQUEST)
        assert client.recv(1) == b"H"  # its deadline is set
    monkeypatch.undo()  # a client that reads has time
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionResetError):  # refused while the two are connected
            if len(served.get()) > 20_000_000:
                return
    raise AssertionError("never answered")


def test_requests_beyond_the_limit_are_refused_while_one_is_answered(serve: Callable[..., Served]) -> None:
    """They do not wait in memory."""
    release = threading.Event()

    def respond(request: Request) -> HttpResponse:
        release.wait(DEADLINE_SECONDS)
        return HttpResponse(body=b"late")

    served = serve(respond, max_connections=4)
    waiting = [served.connect() for _ in range(4)]
    for client in waiting:
        client.sendall(REQUEST)
    wait_until(lambda: len(served.server._connections) == 4)
    wait_until(lambda: all(one.answering for one in list(served.server._connections.values())))
    refused = served.get()
    assert status_of(refused) == 503
    assert refused.endswith(b"too many connections\n")
    release.set()
    assert all(read_all(client).endswith(b"late") for client in waiting)


def test_without_descriptors_a_request_is_refused_and_the_server_recovers(
    serve: Callable[..., Served],
) -> None:
    """Status 503 says why; one warning, whatever happens."""
    served = serve()
    assert status_of(served.get()) == 200
    client, later = socket.socket(), socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with capture_logs() as logs:
        try:
            # other tests of this process may have left descriptors open
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            assert len(taken) > 100
            for sock in (client, later):
                sock.settimeout(DEADLINE_SECONDS)
                sock.connect(served.address)
                sock.sendall(REQUEST)
                answer = read_all(sock)
                assert status_of(answer) in (200, 503)
                if status_of(answer) == 503:
                    assert b"no file descriptors left" in answer
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            client.close()
            later.close()
    assert len(logs) <= 1
    assert status_of(served.get()) == 200


def test_a_stop_before_the_first_request_ends_the_server(serve: Callable[..., Served]) -> None:
    """Also a second stop."""
    served = serve()
    served.server.stop()
    served.server.stop()
    served.thread.join(DEADLINE_SECONDS)
    assert not served.thread.is_alive()


def test_the_head_of_a_request_is_parsed() -> None:
    """Names of headers in lower case, the path without its query."""
    head = b"GET /metrics?x=1 HTTP/1.0\r\nHost: a:1\r\nACCEPT:  text/plain \r\nbroken"
    assert parse_head(head) == Request(
        method="GET", path="/metrics", headers={"host": "a:1", "accept": "text/plain"}
    )
    assert parse_head(b"") is None
