"""A small HTTP/1.1 server for GET requests that cannot exhaust the process it runs in.

One thread accepts, reads and writes all connections; a second one computes the answers, one at a time. The
number of connections, the size of a request and the time of every connection are bounded. With too many
connections, the oldest one that waits for nothing of ours is closed. Without a free descriptor, a request
is answered with status 503. `Request` and `HttpResponse` are messages as objects; parsing reads no socket.
Started by `server.py`, which knows the pages. No TLS, no request bodies, one request per connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import structlog


@dataclass(frozen=True, kw_only=True)
class Request:
    """The head of a request; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class HttpResponse:
    """An answer. `body` is sent with its length; the connection is closed afterwards."""

    status: int = HTTPStatus.OK
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, with_body: bool = True) -> bytes:
        """Return the bytes of the answer."""
        lines = [
            f"HTTP/1.1 {int(self.status)} {HTTPStatus(self.status).phrase}",
            f"content-type: {self.content_type}",
            f"content-length: {len(self.body)}",
            "connection: close",
            *[f"{name}: {value}" for name, value in self.headers.items()],
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (self.body if with_body else b"")


def refusal(status: HTTPStatus, text: str) -> HttpResponse:
    """Return an answer of one line."""
    return HttpResponse(status=status, body=f"{text}\n".encode())


def parse_head(head: bytes) -> Request | None:
    """Parse the first line and the headers of a request; None if it is not HTTP/1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    pairs = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    return Request(method=words[0], path=words[1].partition("?")[0], headers=headers)


MAX_CONNECTIONS = 32
"""Open connections. Prometheus and a browser need fewer than ten."""
MAX_WAITING = 16
"""Requests that wait for their answer; further ones are answered with status 503."""
MAX_HEAD_BYTES = 16 * 1024
"""Size of a request: its first line and headers."""
READ_SECONDS = 5.0
"""Time from accepting a connection to the end of its request."""
WRITE_SECONDS = 15.0
"""Time for sending an answer."""
LINGER_SECONDS = 1.0
"""Time that a client has to close the connection after the answer."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a connection could be neither accepted nor refused."""
POLL_SECONDS = 1.0
EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

log = structlog.get_logger(__name__)


class _Connection:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.socket = sock
        self.deadline = deadline
        self.received = b""
        self.unsent = b""
        self.answering = False
        self.lingering = False

    @property
    def is_idle(self) -> bool:
        """Whether this server owes the client nothing."""
        return not self.answering and not self.unsent


class HttpServer:
    """Serves one listening socket.

    Args:
        listening: the socket; closed when the server ends.
        respond: computes an answer. Called in one thread; an exception is answered with status 500.
        max_connections: limit of open connections.
        monotonic: clock in seconds.
    """

    def __init__(
        self,
        listening: socket.socket,
        respond: Callable[[Request], HttpResponse],
        *,
        max_connections: int = MAX_CONNECTIONS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listening = listening
        self._respond = respond
        self._max_connections = max_connections
        self._monotonic = monotonic
        self._connections: dict[socket.socket, _Connection] = {}
        self._requests: queue.Queue[tuple[_Connection, Request] | None] = queue.Queue(MAX_WAITING)
        self._answers: queue.SimpleQueue[tuple[_Connection, bytes]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._wake: socket.socket | None = None
        self._spare: int | None = None
        self._paused_until: float | None = None
        self._warned = False

    def run(self) -> None:
        """Serve until `stop` is called. Closes every socket at the end.

        Raises:
            OSError: the process has no descriptors for the server itself.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._close_all)
            stack.enter_context(self._listening)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            woken, self._wake = socket.socketpair()
            stack.enter_context(woken)
            stack.enter_context(self._wake)
            for sock in (woken, self._wake, self._listening):
                sock.setblocking(False)
            self._selector.register(woken, selectors.EVENT_READ)
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._take_spare()
            threading.Thread(target=self._answer, name="grpo-run-metrics-answer", daemon=True).start()
            while not self._stopping.is_set():
                self._serve_once(woken)

    def stop(self) -> None:
        """End `run`. May be called more than once, from any thread, also before `run`."""
        self._stopping.set()
        self._notify()
        with contextlib.suppress(queue.Full):
            self._requests.put_nowait(None)  # otherwise the thread is busy, and ends with the process

    def _serve_once(self, woken: socket.socket) -> None:
        # without connections, only a socket ends the wait
        timed = bool(self._connections) or self._paused_until is not None
        for key, _ in self._selector.select(POLL_SECONDS if timed else None):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._listening:
                self._accept()
            elif sock is woken:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._take_answers()
            elif sock in self._connections:  # an earlier event of this round may have closed it
                self._advance(self._connections[sock])
        now = self._monotonic()
        for connection in list(self._connections.values()):
            if now >= connection.deadline and not connection.answering:
                self._close(connection)
        if self._paused_until is not None and now >= self._paused_until:
            self._paused_until = None
            self._selector.register(self._listening, selectors.EVENT_READ)

    # ---- accepting ----

    def _accept(self) -> None:
        """Accept one connection. Without a waiting client, accept(2) may report EMFILE too: ask once only."""
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # otherwise the client has closed the connection already
            if error.errno in EXHAUSTED_ERRNOS:
                self._warn_once(error)
                # the closed connection's descriptor serves the next one
                if not self._close_oldest_idle() and not self._refuse_one():
                    self._pause()
            return
        if len(self._connections) >= self._max_connections and not self._close_oldest_idle():
            _send_and_close(sock, refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))
            return
        sock.setblocking(False)
        connection = _Connection(sock, self._monotonic() + READ_SECONDS)
        try:
            self._selector.register(sock, selectors.EVENT_READ)
        except OSError:  # no memory for another entry
            sock.close()
            return
        self._connections[sock] = connection
        self._advance(connection)  # a client usually has sent its request already

    def _close_oldest_idle(self) -> bool:
        """Close the oldest connection that waits for nothing of ours. Return whether there was one."""
        for connection in self._connections.values():
            if connection.is_idle:
                self._close(connection)
                return True
        return False

    def _refuse_one(self) -> bool:
        """Answer the next client with status 503, on the spare descriptor. Return whether that was possible."""
        if self._spare is None:
            self._take_spare()
            return False
        os.close(self._spare)
        self._spare = None
        try:
            sock, _ = self._listening.accept()
        except OSError:
            return False
        reason = "the supervisor has no file descriptors left; the run continues"
        _send_and_close(sock, refusal(HTTPStatus.SERVICE_UNAVAILABLE, reason))
        self._take_spare()
        return True

    def _take_spare(self) -> None:
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _pause(self) -> None:
        self._selector.unregister(self._listening)
        self._paused_until = self._monotonic() + ACCEPT_PAUSE_SECONDS

    def _warn_once(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning("metrics_connection_refused", reason=error.strerror)

    # ---- one connection ----

    def _advance(self, connection: _Connection) -> None:
        """Read or write what the socket permits."""
        try:
            if connection.unsent:
                self._write(connection)
            else:
                self._read(connection)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection)  # the client has gone

    def _read(self, connection: _Connection) -> None:
        data = connection.socket.recv(MAX_HEAD_BYTES)
        if not data:
            self._close(connection)
            return
        if connection.lingering:
            return  # nothing more is expected; do not keep it
        connection.received += data
        head, end, _ = connection.received.partition(b"\r\n\r\n")
        if not end and len(connection.received) <= MAX_HEAD_BYTES:
            return
        connection.received = b""
        request = parse_head(head) if end and len(head) <= MAX_HEAD_BYTES else None
        if request is None:
            self._begin_write(connection, refusal(HTTPStatus.BAD_REQUEST, "not an HTTP request").encode())
            return
        try:
            self._requests.put_nowait((connection, request))
        except queue.Full:
            busy = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "earlier requests are still being answered")
            self._begin_write(connection, busy.encode())
            return
        connection.answering = True
        self._selector.unregister(connection.socket)  # a client that half-closes still gets its answer

    def _take_answers(self) -> None:
        while True:
            try:
                connection, data = self._answers.get_nowait()
            except queue.Empty:
                return
            connection.answering = False
            self._selector.register(connection.socket, selectors.EVENT_WRITE)
            self._begin_write(connection, data)

    def _begin_write(self, connection: _Connection, data: bytes) -> None:
        connection.unsent = data
        connection.deadline = self._monotonic() + WRITE_SECONDS
        self._selector.modify(connection.socket, selectors.EVENT_WRITE)
        self._advance(connection)

    def _write(self, connection: _Connection) -> None:
        sent = connection.socket.send(connection.unsent)
        connection.unsent = connection.unsent[sent:]
        if connection.unsent:
            return
        # closing a socket with unread data resets the connection, and the client may lose the answer
        connection.lingering = True
        connection.deadline = self._monotonic() + LINGER_SECONDS
        connection.socket.shutdown(socket.SHUT_WR)
        self._selector.modify(connection.socket, selectors.EVENT_READ)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.socket]
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._connections.clear()
        if self._spare is not None:
            os.close(self._spare)

    # ---- the answering thread ----

    def _answer(self) -> None:
        while (waiting := self._requests.get()) is not None and not self._stopping.is_set():
            connection, request = waiting
            try:
                data = self._respond(request).encode(with_body=request.method != "HEAD")
            except Exception as error:
                log.exception("metrics_request_failed", path=request.path)
                text = f"{type(error).__name__}: {error}"
                data = refusal(HTTPStatus.INTERNAL_SERVER_ERROR, text.splitlines()[0]).encode()
            self._answers.put((connection, data))
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # it is full, or the server has ended
                self._wake.send(b"\0")


def _send_and_close(sock: socket.socket, response: HttpResponse) -> None:
    """Send a short answer without waiting; the kernel's buffer holds it."""
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(response.encode())
        sock.shutdown(socket.SHUT_WR)
        sock.recv(MAX_HEAD_BYTES)
