"""HTTP server for the state of a run: `/metrics` for Prometheus, `/state.json` and `/healthz`.

Started by `grpo-run launch` beside the supervisor. The server runs in a daemon thread with its own event
loop, installs no signal handlers and writes no access log. Starlette and uvicorn are imported in that thread,
so starting the server costs the caller only a socket; early requests wait in the socket's backlog. The server
is read-only.
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

from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS, is_loopback, listen, parse_address
from grpo_run.dashboards.metrics.collector import ObservationFailed, RunCollector
from grpo_run.runtime.record.status import RunStatus

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_CONNECTIONS = 32
"""Further requests are answered with status 503, because every request reads the run."""
GRACE_SECONDS = 1

log = structlog.get_logger(__name__)


class MetricsServer:
    """A running server. Created by `start`; ends with the process or with `stop`.

    `open_to_network` tells the caller that other machines can read the metrics, so that it can warn.
    """

    def __init__(
        self, collector: RunCollector, listening: socket.socket, *, open_to_network: bool = False
    ) -> None:
        self.open_to_network = open_to_network
        self._collector = collector
        self._socket = listening
        host, port = listening.getsockname()[:2]
        self.address: tuple[str, int] = (str(host), int(port))
        self._server: uvicorn.Server | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="grpo-run-metrics", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop listening and wait for requests in progress. May be called more than once.

        Returns:
            Whether the server ended within `timeout_seconds`. If not, a read of the run is stuck. This is
            logged; the daemon thread does not keep the process alive.
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
        # No caller receives an exception of this thread: log it, and close the port so that scrapers are
        # refused instead of waiting.
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
    """Start serving a run and return without waiting for the server to be ready.

    Args:
        read: returns the run's status. Called once per request, from another thread, never concurrently.
        address: `host:port`. If the port is in use, the next free port is taken; port 0 is any free port.
        monotonic, wall: clocks in seconds; replaced in tests.

    Raises:
        UsageError: the address is malformed, is not an address of this machine, or has no free port.
    """
    host, port = parse_address(address)
    listening = listen(host, port)
    return MetricsServer(
        RunCollector(read, monotonic=monotonic, wall=wall), listening, open_to_network=not is_loopback(host)
    )


def application(collector: RunCollector) -> Starlette:
    """Return the application.

    Handlers are synchronous; starlette runs them in threads, not in the event loop.
    """
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(collector.registry), headers={"content-type": content_type})

    def state(request: Request) -> Response:
        try:
            text = collector.observe(
                lambda observation: json.dumps(observation.status.as_json(), allow_nan=False)
            )
        except ObservationFailed as error:
            return JSONResponse({"error": f"cannot read the run: {error}"}, status_code=503)
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    def healthz(request: Request) -> Response:
        try:
            run_state = collector.observe(lambda observation: observation.status.state)
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
