"""Stand-in for aiohttp in the process of AsyncGRPO's rollouts: POST of JSON, one connection each."""

from __future__ import annotations

import asyncio
import json as json_module
from typing import Any
from urllib.parse import urlsplit


class ClientError(Exception):
    """A request has failed."""


class ClientTimeout:
    """Limit of a request."""

    def __init__(self, total: float | None = None) -> None:
        self.total = total


class TCPConnector:
    """Limit of connections, which the caller keeps by itself."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit


class _Request:
    def __init__(self, url: str, body: bytes, seconds: float | None) -> None:
        self._url, self._body, self._seconds = urlsplit(url), body, seconds
        self.status, self._content = 0, b""

    async def __aenter__(self) -> Any:
        try:
            await asyncio.wait_for(self._exchange(), self._seconds)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise ClientError(str(error)) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is left open."""

    async def _exchange(self) -> None:
        reader, writer = await asyncio.open_connection(self._url.hostname, self._url.port)
        try:
            head = f"POST {self._url.path} HTTP/1.1\r\nContent-Length: {len(self._body)}\r\n\r\n"
            writer.write(head.encode() + self._body)
            answer = await reader.readuntil(b"\r\n\r\n")
            self.status = int(answer.split()[1])
            self._content = await reader.read()
        finally:
            writer.close()

    def raise_for_status(self) -> None:
        if self.status >= 400:
            raise ClientError(f"status {self.status}")

    async def json(self) -> Any:
        return json_module.loads(self._content)


class ClientSession:
    """Makes requests."""

    def __init__(self, connector: TCPConnector | None = None) -> None:
        self._connector = connector

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is left open."""

    def post(self, url: str, json: Any = None, timeout: ClientTimeout | None = None) -> _Request:
        return _Request(url, json_module.dumps(json).encode(), timeout.total if timeout else None)
