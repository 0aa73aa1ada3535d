"""A local server that receives what `--notify` and `--heartbeat-url` send."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SECRET = "T0/s3cret"


class Receiver(ThreadingHTTPServer):
    """Keeps the text of each message and the path of each heartbeat.

    Args:
        status: of its answers.
        silent: whether it never answers.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, *, status: int = 200, silent: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.status = status
        self.may_answer = threading.Event()
        if not silent:
            self.may_answer.set()
        self.texts: list[str] = []
        self.pings: list[str] = []

    @property
    def url(self) -> str:
        """Its address with a path that is a secret."""
        return f"http://127.0.0.1:{self.server_address[1]}/{SECRET}"


class _Request(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert set(sent) == {"text"}
        self.server.texts.append(sent["text"])
        self._answer()

    def do_GET(self) -> None:
        self.server.pings.append(self.path)
        self._answer()

    def _answer(self) -> None:
        if not self.server.may_answer.is_set():
            self.server.may_answer.wait()
            return
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@contextmanager
def receiver(*, status: int = 200, silent: bool = False) -> Iterator[Receiver]:
    """Serve during the block."""
    server = Receiver(status=status, silent=silent)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.shutdown()
        server.server_close()
