"""The pages of a run's metrics server: `/metrics` for Prometheus, `/state.json` and `/healthz`.

Started by `grpo-run launch` beside the supervisor. The server runs in daemon threads, installs no signal
handlers and writes no access log; early requests wait in the socket's backlog. It is read-only. Connections
are handled in `http_server.py`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

import structlog
from prometheus_client.exposition import choose_encoder

from grpo_run.dashboards.metrics.address import DEFAULT_ADDRESS, Listener, open_listener
from grpo_run.dashboards.metrics.collector import ObservationFailed, RunCollector
from grpo_run.dashboards.metrics.http_server import HttpResponse, HttpServer, Request, refusal
from grpo_run.runtime.history.status import RunStatus

METHODS = ("GET", "HEAD")
SCRAPER_HEADER = "x-prometheus-scrape-timeout-seconds"
"""Prometheus sends it with every scrape; a person who looks at the page does not."""
POLL_SECONDS = 0.05
ANSWER_SECONDS = 0.3
"""How long the answer to a scrape may take, after the run was read."""

log = structlog.get_logger(__name__)


class MetricsServer:
    """A running server. Created by `start`; ends with the process or with `stop`.

    `open_to_network` tells the caller that other machines can read the metrics, so that it can warn.
    """

    def __init__(self, collector: RunCollector, listener: Listener) -> None:
        self.open_to_network = listener.open_to_network
        self.address = listener.address
        self._collector = collector
        self._server = HttpServer(
            listener.socket, lambda request: respond(collector, request, accepts_host=listener.accepts_host)
        )
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
        self._server.stop()
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            log.warning("metrics_server_still_busy", address=self.address, timeout_seconds=timeout_seconds)
            return False
        return True

    def _serve(self) -> None:
        # No caller receives an exception of this thread: log it. The port is closed, so that scrapers are
        # refused instead of waiting.
        try:
            self._server.run()
        except Exception:
            log.exception("metrics_server_failed", address=self.address)


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


def respond(
    collector: RunCollector, request: Request, *, accepts_host: Callable[[str], bool] = lambda host: True
) -> HttpResponse:
    """Return the page that a request asks for.

    Args:
        accepts_host: whether a Host header names this server. A page of another site that resolves its own
            name to this address would otherwise read the run through the user's browser.
    """
    host = request.headers.get("host")
    if host is not None and not accepts_host(host):
        text = f"{host[:200]!r} is not a name of this server; use its address"
        return refusal(HTTPStatus.MISDIRECTED_REQUEST, text)
    page = {"/metrics": _metrics, "/state.json": _state, "/healthz": _healthz}.get(request.path)
    if page is None:
        return refusal(HTTPStatus.NOT_FOUND, "use /metrics, /state.json or /healthz")
    if request.method not in METHODS:
        answer = refusal(HTTPStatus.METHOD_NOT_ALLOWED, "the server is read-only")
        return HttpResponse(status=answer.status, body=answer.body, headers={"allow": ", ".join(METHODS)})
    return page(collector, request)


def _metrics(collector: RunCollector, request: Request) -> HttpResponse:
    if SCRAPER_HEADER in request.headers:
        collector.announce_scraper()
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return HttpResponse(body=encode(collector.registry), content_type=content_type)


def _state(collector: RunCollector, request: Request) -> HttpResponse:
    try:
        text = collector.observe(lambda seen: json.dumps(seen.status.as_json(), allow_nan=False))
    except ObservationFailed as error:
        return _json({"error": f"cannot read the run: {error}"}, HTTPStatus.SERVICE_UNAVAILABLE)
    return HttpResponse(
        body=text.encode(), content_type="application/json", headers={"cache-control": "no-store"}
    )


def _healthz(collector: RunCollector, request: Request) -> HttpResponse:
    try:
        run_state = collector.observe(lambda seen: seen.status.state)
    except ObservationFailed as error:
        return _json({"observed": False, "error": str(error)}, HTTPStatus.SERVICE_UNAVAILABLE)
    return _json({"observed": True, "state": run_state})


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> HttpResponse:
    return HttpResponse(status=status, body=json.dumps(value).encode(), content_type="application/json")
