"""Client of the ranks' worker servers: asks all ranks in parallel, under one deadline.

Torch's worker servers listen on one unix socket per rank and answer from C++ threads; for the Flight
Recorder, even while Python is stuck. Used by `collective_records.py`. Returns bytes; does not interpret them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping

MAX_ANSWER_BYTES = 1024 * 1024
"""256 entries take about 120 KB."""
FLIGHT_RECORDER_HANDLER = "fr_trace_json"
_CONNECT_SECONDS = 0.05
_REQUEST = "POST /handler/{} HTTP/1.1\r\nHost: rank\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class NoAnswer(str):
    """The reason of a failure that passes or ends with the rank: the server did not answer in time, or has just been reset.

    The kernel resets the connections of a process that exits, before its exit is seen.
    """

    __slots__ = ()


def fetch(
    sockets: Mapping[int, str], seconds: float, handler: str = FLIGHT_RECORDER_HANDLER
) -> tuple[dict[int, bytes], dict[int, str]]:
    """Ask every rank; for its Flight Recorder by default.

    Args:
        sockets: socket paths by rank.
        seconds: deadline for all ranks together.
        handler: name of the worker server's handler.

    Returns:
        The JSON by rank, and the reason for each rank without one.
    """
    request = _REQUEST.format(handler).encode()
    deadline = time.monotonic() + seconds
    answers: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    chunks: dict[int, list[bytes]] = {}
    with selectors.DefaultSelector() as selector:
        for rank, path in sockets.items():
            try:
                connection = socket.socket(socket.AF_UNIX)
            except OSError as error:
                failures[rank] = f"no socket: {error.strerror}"
                continue
            connection.settimeout(_CONNECT_SECONDS)
            try:
                connection.connect(path)
                connection.sendall(request)
            except (TimeoutError, BlockingIOError):
                connection.close()
                failures[rank] = NoAnswer(f"no connection within {_CONNECT_SECONDS:g} s")
                continue
            except ConnectionError as error:
                connection.close()
                failures[rank] = NoAnswer(f"{path}: {error.strerror or error}")
                continue
            except OSError as error:
                connection.close()
                failures[rank] = f"{path}: {error.strerror or error}"
                continue
            chunks[rank] = []
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                _receive(selector, key, chunks[key.data], answers, failures)
        for key in list(selector.get_map().values()):
            failures[key.data] = NoAnswer(f"no answer within {seconds:g} s")
            key.fileobj.close()  # type: ignore[union-attr]
    return answers, failures


def _receive(
    selector: selectors.BaseSelector,
    key: selectors.SelectorKey,
    chunks: list[bytes],
    answers: dict[int, bytes],
    failures: dict[int, str],
) -> None:
    """Read what has arrived on one connection; at its end, store the answer or the failure."""
    connection, rank = key.fileobj, key.data
    assert isinstance(connection, socket.socket)
    try:
        data = connection.recv(1 << 17)
    except OSError as error:
        failures[rank] = NoAnswer(error) if isinstance(error, ConnectionError) else str(error)
        data = b""
    if data and sum(map(len, chunks)) < MAX_ANSWER_BYTES:
        chunks.append(data)
        return
    selector.unregister(connection)
    connection.close()
    if rank in failures:
        return
    head, _, body = b"".join(chunks).partition(b"\r\n\r\n")
    if data:
        failures[rank] = f"answer longer than {MAX_ANSWER_BYTES} bytes"
    elif b" 200 " not in head.partition(b"\r\n")[0]:
        reason = f"answered {head[:60]!r}"
        failures[rank] = reason if head else NoAnswer(reason)
    else:
        answers[rank] = body
