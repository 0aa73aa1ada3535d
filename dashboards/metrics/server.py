"""The metrics server of a run, which serves `/metrics` for Prometheus.

Started by `grpo-run launch` beside the supervisor. waitress handles the connections: one thread reads and
writes all of them, one computes the answers, and the number of connections, the size of a request and the
time of a silent connection are bounded. Both are daemon threads; the server installs no signal handlers,
writes no access log and is read-only. Early requests wait in the socket's backlog. No TLS.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import structlog
from prometheus_client import generate_latest
from waitress import create_server, wasyncore

from grpo_run.dashboards.metrics._collector import RunCollector
from grpo_run.dashboards.metrics.address import BACKLOG, DEFAULT_ADDRESS, Listener, open_listener
from grpo_run.runtime.history.status import RunStatus

METHODS = ("GET", "HEAD")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SCRAPER_HEADER = "HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS"
"""Prometheus sends it with every scrape; a person who looks at the page does not."""
POLL_SECONDS = 0.05
ANSWER_SECONDS = 0.3
"""How long the answer to a scrape may take, after the run was read."""
MAX_CONNECTIONS = 256
"""Open connections and three descriptors of the server's own; further clients wait in the backlog."""
DESCRIPTORS_SHARE = 4
"""Connections take at most a fourth of the process's descriptors."""
SILENT_SECONDS = 5
"""A connection without a request is closed after this time, and about a second."""
UNREAD_MILLISECONDS = 15_000
"""A connection is closed if its client acknowledges no data for this time."""
MAX_HEAD_BYTES = 16 * 1024
MAX_BODY_BYTES = 64 * 1024
ACCEPT_PAUSE_SECONDS = 1.0
EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = structlog.get_logger(__name__)

StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Environ = dict[str, Any]


def connection_limit() -> int:
    """Return how many connections the server may hold: the supervisor needs its descriptors for evidence."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE)


class ListeningSocket(socket.socket):
    """A listening socket that pauses if the process has no descriptors left: the client stays in the
    backlog.
    """

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            OSError: there is none, or no descriptor for it.
        """
        try:
            return super().accept()
        except OSError as error:
            if error.errno in EXHAUSTED_ERRNOS:
                time.sleep(ACCEPT_PAUSE_SECONDS)
            raise


class MetricsServer:
    """A running server. Created by `start`; ends with the process or with `stop`.

    `open_to_network` tells the caller that other machines can read the metrics, so that it can warn.
    """

    def __init__(self, collector: RunCollector, listener: Listener) -> None:
        self.open_to_network = listener.open_to_network
        self.address, self.target = listener.address, listener.target
        self._collector = collector
        # its warnings about queues would be in the terminal's way
        logging.getLogger("waitress").setLevel(logging.ERROR)
        listening = ListeningSocket(fileno=listener.socket.detach())
        # sockets of accepted connections inherit it
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS)
        self._map: dict[int, Any] = {}
        self._server = create_server(
            application(collector, listener.accepts_host),
            self._map,
            sockets=[listening],
            backlog=BACKLOG,
            threads=1,
            connection_limit=connection_limit(),
            channel_timeout=SILENT_SECONDS,
            cleanup_interval=1,
            max_request_header_size=MAX_HEAD_BYTES,
            max_request_body_size=MAX_BODY_BYTES,
            log_socket_errors=False,
            ident=None,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="grpo-run-metrics", daemon=True)
        self._thread.start()

    def seconds_to_stay(self, ended_at: float) -> float:
        """How long a regular scraper may take to read the last state; 0 without one, or once it has read it.

        Args:
            ended_at: when the run ended, in monotonic seconds.
        """
        return self._collector.seconds_to_stay(ended_at)

    def await_last_scrapes(self, ended_at: float, interrupted: Callable[[], bool]) -> None:
        """Wait until a regular scraper has read the last state, so that it knows how the run has ended.

        Returns at once without such a scraper, and as soon as `interrupted` returns true.
        """
        stayed = False
        while self.seconds_to_stay(ended_at) > 0 and not interrupted():
            stayed = True
            time.sleep(POLL_SECONDS)
        if stayed and not interrupted():
            time.sleep(ANSWER_SECONDS)  # the last scrape may still be answered

    def stop(self, timeout_seconds: float) -> bool:
        """Stop listening. May be called more than once. A request in progress is not answered.

        Returns:
            Whether the server ended within `timeout_seconds`. If not, this is logged; the daemon thread does
            not keep the process alive.
        """
        self._stopping.set()
        self._server.pull_trigger()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            log.warning("metrics_server_still_busy", address=self.address, timeout_seconds=timeout_seconds)
            return False
        return True

    def _serve(self) -> None:
        # No caller receives an exception of this thread: log it. The port is closed, so that scrapers are
        # refused instead of waiting.
        try:
            while not self._stopping.is_set():
                wasyncore.loop(timeout=1.0, use_poll=True, map=self._map, count=1)
        except Exception:
            log.exception("metrics_server_failed", address=self.address)
        finally:
            self._server.task_dispatcher.set_thread_count(0)
            # not the trigger, nor `close` of the server, which closes it: a request in progress will write to
            # its pipe
            for one in list(self._map.values()):
                if one is not self._server.trigger:
                    wasyncore.dispatcher.close(one)


def start(
    read: Callable[[], RunStatus],
    address: str | Listener = DEFAULT_ADDRESS,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> MetricsServer:
    """Start serving a run and return without waiting for the server to be ready.

    Args:
        read: returns the run's status. Called once per request, from another thread, never concurrently.
        address: `host:port`, or what `open_listener` returned for it. If the port is in use, the next free
            port is taken; port 0 is any free port.
        monotonic, wall: clocks in seconds; replaced in tests.

    Raises:
        UsageError: the address is malformed, is not an address of this machine, or has no free port.
    """
    listener = open_listener(address) if isinstance(address, str) else address
    return MetricsServer(RunCollector(read, monotonic=monotonic, wall=wall), listener)


def application(
    collector: RunCollector, accepts_host: Callable[[str], bool]
) -> Callable[[Environ, StartResponse], Iterable[bytes]]:
    """Return the WSGI application.

    Args:
        accepts_host: whether a Host header names this server. A page of another site that resolves its own
            name to this address would otherwise read the run through the user's browser.
    """

    def answer(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        host, path = environ.get("HTTP_HOST"), environ["PATH_INFO"]
        if host is not None and not accepts_host(host):
            text = f"{host[:200]!r} is not a name of this server; use its address"
            return _plain(start_response, HTTPStatus.MISDIRECTED_REQUEST, text)
        if path != "/metrics":
            return _plain(start_response, HTTPStatus.NOT_FOUND, "use /metrics")
        if environ["REQUEST_METHOD"] not in METHODS:
            return _plain(start_response, HTTPStatus.METHOD_NOT_ALLOWED, "the server is read-only")
        if SCRAPER_HEADER in environ:
            collector.announce_scraper()
        page = generate_latest(collector.registry).decode()
        return _answer(start_response, HTTPStatus.OK, CONTENT_TYPE, page)

    def guarded(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return answer(environ, start_response)
        except Exception as error:
            log.exception("metrics_request_failed", path=environ["PATH_INFO"])
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            return _plain(start_response, HTTPStatus.INTERNAL_SERVER_ERROR, text)

    return guarded


def _plain(start_response: StartResponse, status: HTTPStatus, text: str) -> Iterable[bytes]:
    return _answer(start_response, status, "text/plain; charset=utf-8", f"{text}\n")


def _answer(start_response: StartResponse, status: HTTPStatus, content_type: str, text: str) -> list[bytes]:
    body = text.encode()
    headers = [("Content-Type", content_type), ("Content-Length", str(len(body)))]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append(("Allow", ", ".join(METHODS)))
    start_response(f"{int(status)} {status.phrase}", [*headers, ("Cache-Control", "no-store")])
    return [body]
