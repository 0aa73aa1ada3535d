"""Requests and answers of HTTP/1.1, as bytes and as objects.

Used by `http_server.py`, which sends them, and by `dashboards/metrics/server.py`, which answers. Reads no socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus


@dataclass(frozen=True, kw_only=True)
class Request:
    """The head of a request; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Response:
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


def refusal(status: HTTPStatus, text: str) -> Response:
    """Return an answer of one line."""
    return Response(status=status, body=f"{text}\n".encode())


def parse_head(head: bytes) -> Request | None:
    """Parse the first line and the headers of a request; None if it is not HTTP/1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    pairs = [line.partition(":") for line in lines]
    headers = {name.strip().lower(): value.strip() for name, colon, value in pairs if colon}
    return Request(method=words[0], path=words[1].partition("?")[0], headers=headers)
