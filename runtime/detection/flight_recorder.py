"""Asks ranks' worker servers for their Flight Recorders, all at once, under one deadline.

The servers are torch's, one a rank on a unix socket, answering from C++ threads while Python is stuck. Used by
`detector.py`. Reads bytes; does not interpret them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping

MAX_ANSWER_BYTES = 1024 * 1024
"""256 entries take about 120 KB."""
_REQUEST = (
    b"POST /handler/fr_trace_json HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


def fetch(sockets: Mapping[int, str], seconds: float) -> tuple[dict[int, bytes], dict[int, str]]:
    """Fetch from every rank.

    Args:
        sockets: paths by rank.
        seconds: for all of them together.

    Returns:
        JSON by rank, and for each rank without, why.
    """
    deadline = time.monotonic() + seconds
    answers: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    parts: dict[int, list[bytes]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, path in sockets.items():
            try:
                connection = socket.socket(socket.AF_UNIX)
            except OSError as error:
                failures[rank] = f"no socket: {error.strerror}"
                continue
            connection.settimeout(0.05)
            try:
                connection.connect(path)
                connection.sendall(_REQUEST)
            except OSError as error:
                connection.close()
                failures[rank] = f"{path}: {error.strerror or error}"
                continue
            parts[rank] = []
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                _receive(selector, key, parts[key.data], answers, failures)
        for key in list(selector.get_map().values()):
            failures[key.data] = f"no answer within {seconds:g} s"
            key.fileobj.close()  # type: ignore[union-attr]
    return answers, failures


def _receive(
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    parts: list[bytes],
    answers: dict[int, bytes],
    failures: dict[int, str],
) -> None:
    connection, rank = key.fileobj, key.data
    assert isinstance(connection, socket.socket)
    try:
        data = connection.recv(1 << 17)
    except OSError as error:
        failures[rank] = str(error)
        data = b""
    if data and sum(map(len, parts)) < MAX_ANSWER_BYTES:
        parts.append(data)
        return
    selector.unregister(connection)
    connection.close()
    if rank in failures:
        return
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if data:
        failures[rank] = f"answer longer than {MAX_ANSWER_BYTES} bytes"
    elif b" 200 " not in head.partition(b"\r\n")[0]:
        failures[rank] = f"answered {head[:60]!r}"
    else:
        answers[rank] = body
