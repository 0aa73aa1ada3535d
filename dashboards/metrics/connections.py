"""Connections of the HTTP server: uvicorn, with bounds on how many there are and how long one is silent.

Called by `server.py`, whose server is a thread of `grpo-run launch`, and by `grpo-run serve`. Imported with
the first client only, because uvicorn and starlette would take time of every launch. A connection has one
request, whose head comes within seconds, or it is closed. A client that does not read is ended by the
kernel. Logs nothing of requests, which may have a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import structlog
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from grpo_run.dashboards.metrics.address import BACKLOG

MAX_CONNECTIONS = 256
"""Further clients wait in the backlog."""
DESCRIPTORS_SHARE = 4
"""Connections take at most a fourth of the process's descriptors."""
SILENT_SECONDS = 5
"""A connection without a request is closed after this time."""
UNREAD_MILLISECONDS = 15_000
"""A connection is closed if its client acknowledges no data for this time."""
MAX_HEAD_BYTES = 16 * 1024
END_SECONDS = 1

Result = TypeVar("Result")
log = structlog.get_logger(__name__)


def connection_limit() -> int:
    """Return how many connections the server may hold: the supervisor needs its descriptors for evidence."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE)


class BoundedSocket(socket.socket):
    """A listening socket that accepts nobody beyond the limit. asyncio then tries again a second later, as it
    does without a free descriptor.
    """

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(fileno=listening.detach())
        self._accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        # sockets of accepted connections inherit it
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection.

        Raises:
            OSError: there is none, or no descriptor or place for it.
        """
        if sum(one.fileno() >= 0 for one in self._accepted) >= connection_limit():
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        connection, address = super().accept()
        self._accepted.add(connection)
        return connection, address


class BoundedProtocol(H11Protocol):
    """Closes a connection whose request does not come. A client that has sent its request is answered, also
    if it has closed its side.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the request."""
        super().connection_made(transport)
        self.loop.call_later(SILENT_SECONDS, self._end_if_silent)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether an answer is still to be written."""
        return self.cycle is not None and not self.cycle.response_started

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def http_server(app: ASGIApp, accepts_host: Callable[[str], bool]) -> uvicorn.Server:
    """Return the server of an application, to be given a `BoundedSocket`; it handles signals in the main
    thread only.

    Args:
        accepts_host: as `Listener.accepts_host`.
    """
    return uvicorn.Server(
        uvicorn.Config(
            guarded(app, accepts_host),
            http=BoundedProtocol,
            ws="none",
            loop="asyncio",
            headers=[("connection", "close")],
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_graceful_shutdown=END_SECONDS,
            log_config=None,
            log_level="critical",  # errors are logged by the application
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
    )


def guarded(app: ASGIApp, accepts_host: Callable[[str], bool]) -> ASGIApp:
    """Return an application that answers to its own names only, and logs what fails in it.

    A page of another site that resolves its own name to this address would otherwise read the run through the
    user's browser.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            asyncio.get_running_loop().set_exception_handler(_report)
        elif (host := Headers(scope=scope).get("host")) is not None and not accepts_host(host):
            text = f"{host[:200]!r} is not a name of this server; use its address\n"
            await PlainTextResponse(text, 421)(scope, receive, send)
            return
        try:
            await app(scope, receive, send)
        except Exception:  # the client has been answered 500
            log.exception("http_application_failed")

    return answer


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error outside of requests; clients that have to wait are none."""
    error = context.get("exception")
    if not isinstance(error, OSError):
        log.error("http_server_error", what=context["message"], exc_info=error)


async def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a daemon thread: one that waits for a disk keeps no process from ending.

    Raises:
        Exception: what the function raises.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: object) -> None:
        if not future.done():
            set_it(value)

    def call() -> None:
        outcome: tuple[Callable[[Any], None], object]
        try:
            outcome = future.set_result, function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=call, daemon=True).start()
    return await future
