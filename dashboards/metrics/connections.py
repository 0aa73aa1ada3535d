"""Connections of the HTTP server: uvicorn, with bounds on how many there are and how long one is silent.

Called by `server.py`, whose server is a thread of `grpo-run launch`, and by `grpo-run serve`. Imported with
the first client only, because uvicorn and starlette would take time of every launch. A connection has one
request, whose head comes within seconds, or it is closed. A client that does not read is ended by the
kernel. Logs nothing of requests, which may have a token.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_CONNECTIONS = 256
"""A further client takes the place of the one that has been silent for longest."""
DESCRIPTORS_SHARE = 4
"""Connections take at most a fourth of the process's descriptors."""
SILENT_SECONDS = 5
"""A connection without a request is closed after this time."""
UNREAD_MILLISECONDS = 15_000
"""A connection is closed if its client acknowledges no data for this time."""
MAX_HEAD_BYTES = 16 * 1024
TICK_SECONDS = 0.25

Result = TypeVar("Result")
log = structlog.get_logger(__name__)


def connection_limit() -> int:
    """Return how many connections the server may hold: the supervisor needs its descriptors for evidence.

    So many clients wait at most, since asyncio accepts all that wait before any connection is made.
    """
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE)


class BoundedProtocol(H11Protocol):
    """One of a bounded number of connections, each of which is closed if its request does not come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the request."""
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS)
        self.ends = self.loop.call_later(SILENT_SECONDS, self.end_if_silent)
        mine = [one for one in self.connections if isinstance(one, BoundedProtocol)]
        still_open = [one for one in mine if not one.transport.is_closing()]
        if len(still_open) > connection_limit():
            silent = (one for one in still_open if one.cycle is None)
            min(silent, key=lambda one: one.ends.when()).transport.abort()

    def end_if_silent(self) -> None:
        """Close the connection if it has no request yet."""
        if self.cycle is None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self.ends.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the client, which sends no more, still gets an answer."""
        return self.cycle is not None and not self.cycle.response_started


class QuietServer(uvicorn.Server):
    """Looks four times a second whether it is to end: ten times would cost more than the scrapes."""

    async def main_loop(self) -> None:
        """Return when the server is to end."""
        while not await self.on_tick(0):
            await asyncio.sleep(TICK_SECONDS)


def http_server(app: ASGIApp, accepts_host: Callable[[str], bool], *, end_seconds: int = 0) -> uvicorn.Server:
    """Return the server of an application. It handles signals in the main thread only.

    Args:
        accepts_host: as `Listener.accepts_host`.
        end_seconds: for requests in progress when the server is to end.
    """
    config = uvicorn.Config(
        guarded(app, accepts_host), http=BoundedProtocol, ws="none", headers=[("connection", "close")],
        backlog=connection_limit(), h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=end_seconds, log_config=None, log_level="critical", server_header=False,
        date_header=False,
    )  # fmt: skip
    return QuietServer(config)


def guarded(app: ASGIApp, accepts_host: Callable[[str], bool]) -> ASGIApp:
    """Return an application that answers to its own names only, and logs what fails in it.

    A page of another site that resolves its own name to this address would otherwise read the run through the
    user's browser.
    """

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        log.warning("http_server_error", what=context["message"], error=str(context.get("exception")))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().set_exception_handler(report)
        elif (host := Headers(scope=scope).get("host")) is not None and not accepts_host(host):
            text = f"{host[:200]!r} is not a name of this server; use its address\n"
            await PlainTextResponse(text, 421)(scope, receive, send)
            return
        try:
            await app(scope, receive, send)
        except Exception:  # the client has been answered 500
            log.exception("http_application_failed")

    return answer


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a daemon thread: one that waits for a disk keeps no process from ending.

    Raises:
        Exception: what the function raises.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return await asyncio.wrap_future(future)
