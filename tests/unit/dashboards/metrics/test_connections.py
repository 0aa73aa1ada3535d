"""The metrics server answers with bounded connections and threads, whatever its clients do."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from grpo_run.dashboards.metrics import connections as module
from grpo_run.dashboards.metrics.server import MetricsServer, start

DEADLINE_SECONDS = 30.0
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture
def server(make_status: Any) -> Iterator[MetricsServer]:
    """A server on a free port."""
    made = start(make_status, "127.0.0.1:0")
    yield made
    assert made.stop(DEADLINE_SECONDS)


@contextlib.contextmanager
def connection(server: MetricsServer) -> Iterator[socket.socket]:
    """Connect a client."""
    with socket.create_connection(server.address, timeout=DEADLINE_SECONDS) as client:
        yield client


def status_of(server: MetricsServer, request: bytes = REQUEST) -> int:
    """Send a request; return the status of its answer."""
    with connection(server) as client:
        client.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # after the answer to what it has not read
            while data := client.recv(65536):
                received += data
    return int(received.split(b" ")[1])


def test_silent_connections_do_not_keep_others_out(server: MetricsServer) -> None:
    """They are closed after their time, also one that has sent a part of a request; their number is
    bounded.
    """
    assert status_of(server) == 200
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connection(server)) for _ in range(300)]
        silent[0].sendall(b"GET /metrics HT")
        time.sleep(0.2)
        assert len(os.listdir("/proc/self/fd")) <= before + 300 + module.MAX_CONNECTIONS
        assert threading.active_count() <= threads
        assert status_of(server) == 200
        with contextlib.suppress(ConnectionResetError):  # of a connection with bytes that nobody has read
            assert silent[0].recv(1) == b""


def test_connections_leave_the_process_most_of_its_descriptors() -> None:
    """The supervisor needs them for the evidence of a fault."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        assert module.connection_limit() == 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_request_in_pieces_is_answered(server: MetricsServer) -> None:
    """A slow network is not an attack. A client that half-closes gets its answer too."""
    with connection(server) as client:
        for part in (REQUEST[:10], REQUEST[10:30], REQUEST[30:]):
            client.sendall(part)
            time.sleep(0.02)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 2 * module.MAX_HEAD_BYTES + b"\r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n", 405),
    ],
)
def test_what_is_no_small_request_is_refused(
    server: MetricsServer, request_bytes: bytes, status: int
) -> None:
    """No more than the limit is kept."""
    assert status_of(server, request_bytes) == status


def test_an_exception_is_answered_and_the_server_goes_on(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 500."""

    def fail() -> None:
        raise KeyError("rank")

    with monkeypatch.context() as patch, capture_logs():  # drawing a traceback takes half a second
        patch.setattr(server._collector, "announce_scraper", fail)
        scrape = b"GET /metrics HTTP/1.0\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"
        assert status_of(server, scrape) == 500
    assert status_of(server) == 200


def test_without_descriptors_a_client_waits_and_the_server_recovers(server: MetricsServer) -> None:
    """The server does not spin meanwhile."""
    assert status_of(server) == 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket() as client:
        client.settimeout(DEADLINE_SECONDS)
        try:
            # other tests of this process may have left descriptors open
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            client.connect(server.address)
            client.sendall(REQUEST)
            used = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - used < 0.25
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.recv(12) == b"HTTP/1.1 200"
