"""The server answers from the current state of the run until it is stopped."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from structlog.testing import capture_logs

from grpo_run.dashboards.metrics.server import MetricsServer, start
from grpo_run.runtime.history.status import RunStatus

DEADLINE_SECONDS = 20.0


@pytest.fixture
def serve() -> Iterator[Callable[..., MetricsServer]]:
    """Start servers on free ports, and stop them after the test."""
    servers: list[MetricsServer] = []

    def begin(read: Callable[[], RunStatus], address: str = "127.0.0.1:0") -> MetricsServer:
        servers.append(start(read, address))
        return servers[-1]

    yield begin
    assert all(server.stop(DEADLINE_SECONDS) for server in servers)


def get(server: MetricsServer, path: str) -> httpx.Response:
    """Send one request; the first request waits until the server's thread is ready."""
    host, port = server.address
    return httpx.get(f"http://{host}:{port}{path}", timeout=DEADLINE_SECONDS, trust_env=False)


def test_metrics_are_prometheus_text(serve: Any, make_slot: Any, make_status: Any) -> None:
    """/metrics is in the Prometheus text format and has the run's values."""
    answer = get(serve(lambda: make_status(make_slot(0))), "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'grpo_step{run_id="night"} 7.0' in answer.text.splitlines()


def test_the_metrics_of_an_unreadable_run_say_so(serve: Any) -> None:
    """The page is answered all the same."""

    def read() -> RunStatus:
        raise OSError("gone")

    assert 'grpo_observation_failed{run_id=""} 1.0' in get(serve(read), "/metrics").text


def test_the_server_is_read_only_and_has_one_page(serve: Any, make_status: Any) -> None:
    """POST is rejected, and other paths do not exist."""
    server = serve(make_status)
    host, port = server.address
    with httpx.Client(timeout=DEADLINE_SECONDS, trust_env=False) as client:
        assert client.post(f"http://{host}:{port}/metrics").status_code == 405
        assert client.get(f"http://{host}:{port}/").status_code == 404


def test_two_servers_with_one_address_get_two_ports(serve: Any, make_status: Any) -> None:
    """The second server uses the next free port."""
    first = serve(make_status)
    second = serve(make_status, f"127.0.0.1:{first.address[1]}")
    assert second.address[1] > first.address[1]
    assert get(second, "/metrics").status_code == 200


def test_stopped_server_closes_its_port(make_status: Any) -> None:
    """After `stop` connections are refused; a second `stop` has no effect."""
    server = start(make_status, "127.0.0.1:0")
    assert get(server, "/metrics").status_code == 200
    assert server.stop(DEADLINE_SECONDS)
    assert server.stop(DEADLINE_SECONDS)
    with socket.socket() as sock, pytest.raises(ConnectionRefusedError):
        sock.connect(server.address)


def test_server_stopped_immediately_ends(make_status: Any) -> None:
    """A stop before the thread has created its server is honoured."""
    assert start(make_status, "127.0.0.1:0").stop(DEADLINE_SECONDS)


def test_stuck_read_does_not_delay_the_stop(make_status: Any) -> None:
    """A hung run directory blocks the request, but not the end of the supervisor."""
    entered, release = threading.Event(), threading.Event()

    def read() -> RunStatus:
        entered.set()
        release.wait(DEADLINE_SECONDS)
        status: RunStatus = make_status()
        return status

    server = start(read, "127.0.0.1:0")
    with socket.create_connection(server.address, timeout=DEADLINE_SECONDS) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert entered.wait(DEADLINE_SECONDS)
        stopped = server.stop(DEADLINE_SECONDS / 2)
        release.set()
    assert stopped


def test_signal_handlers_are_unchanged_and_requests_are_not_logged(serve: Any, make_status: Any) -> None:
    """The server belongs to a program that has its own handlers and its own output."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with capture_logs() as logs:
        assert get(serve(make_status), "/metrics").status_code == 200
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert logs == []


IDLE = """
import sys, threading, time
import grpo_run.dashboards.metrics.server as module
server = module.start(lambda: None, "127.0.0.1:0")
time.sleep(0.5)
print(sorted({"torch", "uvicorn", "starlette", "yaml"} & sys.modules.keys()), threading.active_count())
print(server.stop(20))
"""


def test_without_a_client_the_server_is_one_thread_that_has_imported_nothing() -> None:
    """Starting it takes no time of a launch, and a run that nobody scrapes pays for no server."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", IDLE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[] 2\nTrue\n"


def test_a_run_has_the_runbook_of_its_alerts(serve: Any, make_status: Any) -> None:
    """Without a token: it says nothing of the run."""
    answer = get(serve(make_status), "/runbook")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert '<section id="grporunhang">' in answer.text


def test_a_page_is_beside_the_metrics_and_cannot_disturb_them(make_status: Any) -> None:
    """It is made when the first client comes; an address of it that fails is answered 500."""
    made: list[str] = []

    def fail(request: Request) -> None:
        raise KeyError("page")

    def page(also: Sequence[Route]) -> Starlette:
        made.append("page")
        return Starlette(routes=[*also, Route("/fails", fail)])

    with capture_logs() as logs:
        server = start(make_status, "127.0.0.1:0", page=page)
        try:
            assert made == []
            assert get(server, "/fails").status_code == 500
            assert get(server, "/metrics").status_code == 200
            assert made == ["page"]
        finally:
            assert server.stop(DEADLINE_SECONDS)
    # Only now: the answer is sent before the error is logged.
    assert [entry["event"] for entry in logs] == ["http_application_failed"]


def test_a_page_that_cannot_be_made_leaves_the_metrics(make_status: Any) -> None:
    """A fault of the page is none of the run."""

    def page(also: Sequence[Route]) -> Starlette:
        raise KeyError("page")

    with capture_logs() as logs:
        server = start(make_status, "127.0.0.1:0", page=page)
        try:
            assert get(server, "/metrics").status_code == 200
        finally:
            assert server.stop(DEADLINE_SECONDS)
    assert [entry["event"] for entry in logs] == ["live_page_failed"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:9460", 200), ("[::1]:80", 200), ("attacker.example", 421), ("", 421)],
)
def test_a_foreign_name_reads_nothing(
    serve: Any, make_slot: Any, make_status: Any, host: str, status: int
) -> None:
    """A site that resolves its own name to loopback would otherwise read the run through a browser."""
    server = serve(lambda: make_status(make_slot(0)))
    address = "http://{}:{}".format(*server.address)
    answer = httpx.get(
        address + "/metrics", headers={"host": host}, timeout=DEADLINE_SECONDS, trust_env=False
    )
    assert answer.status_code == status
    if status != 200:
        assert "is not a name of this server" in answer.text
        assert answer.text.count("\n") == 1
