"""The HTTP server of a run, a thread beside the supervisor: `/metrics`, `/runbook` and the live page.

Started by `grpo-run launch`. Until the first client comes, the thread only waits for it; then it imports
uvicorn (`connections.py`). It is a daemon thread, installs no signal handlers, writes no access log and is
read-only. Early requests wait in the socket's backlog. No TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from grpo_run.dashboards.metrics._collector import RunCollector
from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS, Listener, open_listener
from grpo_run.runtime.history.status import RunStatus

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import ASGIApp

HEADERS = {"content-type": "text/plain; version=0.0.4; charset=utf-8", "cache-control": "no-store"}
SCRAPER_HEADER = "x-prometheus-scrape-timeout-seconds"
"""Prometheus sends it with every scrape; a person who looks at the page does not."""
POLL_SECONDS = 0.05
ANSWER_SECONDS = 0.3
"""How long the answer to a scrape may take, after the run was read."""
IDLE_MILLISECONDS = 1000

log = structlog.get_logger(__name__)


class MetricsServer:
    """A running server. Created by `start`; ends with the process or with `stop`.

    `open_to_network` tells the caller that other machines can read the metrics, so that it can warn.
    """

    def __init__(
        self, collector: RunCollector, listener: Listener, page: Callable[[Sequence[Route]], ASGIApp] | None
    ) -> None:
        self.open_to_network = listener.open_to_network
        self.address, self.target = listener.address, listener.target
        self._collector, self._listener, self._page = collector, listener, page
        self._stopping = threading.Event()
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._run, name="grpo-run-metrics", daemon=True)
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
        if self._server is not None:
            self._server.should_exit = True
        else:
            with contextlib.suppress(OSError):  # it has ended
                self._listener.socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            log.warning("metrics_server_still_busy", address=self.address, timeout_seconds=timeout_seconds)
            return False
        return True

    def _run(self) -> None:
        # No caller receives an exception of this thread: log it. The port is closed, so that scrapers are
        # refused instead of waiting.
        clients = select.poll()
        clients.register(self._listener.socket, select.POLLIN)
        try:
            while not self._stopping.is_set() and not clients.poll(IDLE_MILLISECONDS):
                pass
            if not self._stopping.is_set():
                asyncio.run(self._serve())
        except Exception:
            log.exception("metrics_server_failed", address=self.address)
        finally:
            self._listener.socket.close()

    async def _serve(self) -> None:
        from starlette.applications import Starlette
        from starlette.routing import Route

        from grpo_run.dashboards.metrics.connections import http_server
        from grpo_run.dashboards.runbook import runbook

        self._reading = asyncio.Lock()
        routes = [Route("/metrics", self._metrics), Route("/runbook", runbook)]
        app: ASGIApp = Starlette(routes=routes)
        try:
            app = app if self._page is None else self._page(routes)
        except Exception:  # the metrics do without it
            log.exception("live_page_failed")
        self._server = http_server(app, self._listener.accepts_host)
        if self._stopping.is_set():
            self._server.should_exit = True
        await self._server.serve(sockets=[self._listener.socket])

    async def _metrics(self, request: Request) -> Response:
        from starlette.responses import Response

        from grpo_run.dashboards.metrics.connections import in_thread

        if SCRAPER_HEADER in request.headers:
            self._collector.announce_scraper()
        async with self._reading:
            text = await in_thread(self._collector.page)
        return Response(text, headers=HEADERS)


def start(
    read: Callable[[], RunStatus],
    address: str | Listener = DEFAULT_ADDRESS,
    *,
    page: Callable[[Sequence[Route]], ASGIApp] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> MetricsServer:
    """Start serving a run and return without waiting for the server to be ready.

    Args:
        read: returns the run's status. Called once per request, from another thread, never concurrently.
        address: `host:port`, or what `open_listener` returned for it. If the port is in use, the next free
            port is taken; port 0 is any free port.
        page: returns an application that has the given routes too. Called when the first client comes.
        monotonic, wall: clocks in seconds; replaced in tests.

    Raises:
        UsageError: the address is malformed, is not an address of this machine, or has no free port.
    """
    listener = open_listener(address) if isinstance(address, str) else address
    return MetricsServer(RunCollector(read, monotonic=monotonic, wall=wall), listener, page)
