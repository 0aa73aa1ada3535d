"""The HTTP server beside a run: `/metrics` for Prometheus, `/state.json`, `/healthz`.

Started by the supervisor (through `cli`) and by commands that serve a run directory. It lives in a daemon
thread with an event loop of its own, installs no signal handlers, writes no access log, and imports
starlette and uvicorn in that thread, so that starting it costs the caller a socket and nothing else.
Scrapes that come before it is ready wait in the socket's backlog. Only reads; there is nothing to post.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog
from prometheus_client.exposition import choose_encoder

from grpo_run.dashboards.metrics.address import is_loopback, listen, parse_address
from grpo_run.dashboards.metrics.collector import ObservationFailed, RunCollector
from grpo_run.runtime.record.status import RunStatus

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

DEFAULT_ADDRESS = "127.0.0.1:9460"
MAX_CONNECTIONS = 32
"""Requests beyond these are answered 503 at once: a reading of a run is not free."""
GRACE_SECONDS = 1

log = structlog.get_logger(__name__)


class MetricsServer:
    """A running server. Made by `start`; stops with the process or by `stop`."""

    def __init__(self, collector: RunCollector, listening: socket.socket) -> None:
        self._collector = collector
        self._socket = listening
        host, port = listening.getsockname()[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        self._server: uvicorn.Server | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="grpo-run-metrics", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop listening, let requests in progress end, and wait; safe to call twice.

        Returns:
            Whether the server ended within `timeout_seconds`. If not, a reading of the run is stuck: that is
            logged, and the daemon thread does not keep the process alive.
        """
        self._stopping.set()
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            log.warning("metrics_server_still_busy", address=self.address, timeout_seconds=timeout_seconds)
            return False
        return True

    def _serve(self) -> None:
        # Nobody joins this thread to hear of an error: it is logged here, and the port is given back so that
        # a scraper is refused rather than left waiting.
        try:
            import uvicorn

            config = uvicorn.Config(
                application(self._collector),
                access_log=False,
                http="h11",
                lifespan="off",
                limit_concurrency=MAX_CONNECTIONS,
                log_config=None,
                log_level="warning",
                loop="asyncio",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                ws="none",
            )
            self._server = uvicorn.Server(config)
            if not self._stopping.is_set():
                self._server.run(sockets=[self._socket])
        except Exception:
            log.exception("metrics_server_failed", address=self.address)
        finally:
            self._socket.close()


def start(
    read: Callable[[], RunStatus],
    address: str = DEFAULT_ADDRESS,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> MetricsServer:
    """Serve a run and return at once.

    Args:
        read: gives the run's status; called once a request, from another thread, one call at a time.
        address: `host:port`; a taken port is passed over for the next free one, 0 is any free one.
        monotonic, wall: clocks, in seconds, replaceable in tests.

    Raises:
        UsageError: the address is malformed, not this machine's, or has no free port.
    """
    host, port = parse_address(address)
    listening = listen(host, port)
    server = MetricsServer(RunCollector(read, monotonic=monotonic, wall=wall), listening)
    if not is_loopback(host):
        log.warning("metrics_open_to_network", address=server.address)
    return server


def application(collector: RunCollector) -> Starlette:
    """The routes. Handlers are plain functions: starlette runs them in threads, off the event loop."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(collector.registry), headers={"content-type": content_type})

    def state(request: Request) -> Response:
        try:
            text = collector.observe(lambda seen: json.dumps(seen.status.as_json(), allow_nan=False))
        except ObservationFailed as error:
            return JSONResponse({"error": f"the run cannot be read: {error}"}, status_code=503)
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    def healthz(request: Request) -> Response:
        try:
            run_state = collector.observe(lambda seen: seen.status.state)
        except ObservationFailed as error:
            return JSONResponse({"observed": False, "error": str(error)}, status_code=503)
        return JSONResponse({"observed": True, "state": run_state})

    return Starlette(
        routes=[
            Route("/metrics", metrics, methods=["GET"]),
            Route("/state.json", state, methods=["GET"]),
            Route("/healthz", healthz, methods=["GET"]),
        ]
    )
