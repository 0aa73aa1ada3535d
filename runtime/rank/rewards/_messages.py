"""Messages between rank and worker, and their framing on a Unix socket.

A frame is its length in eight bytes, then the bytes. The rank reads and writes with a deadline, because its
worker may be killed in the middle of a frame; host, keeper and worker block. Does not interpret what a frame
contains.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.history.rewards import FailureKind
from grpo_run.runtime.rank.rewards.generators import GeneratorStates

LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 256 * 1024 * 1024
"""A worker that announces more is broken."""
_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a call has no result.

    Attributes:
        message: one line.
        traceback: as Python prints it; empty if there is none.
    """

    kind: FailureKind
    message: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One call for a worker.

    Attributes:
        key: identifies the function among those of this rank.
        function: pickled; None for a worker that has it already.
        arguments: the pickled keyword arguments.
        generators: states before the call.
    """

    key: int
    function: bytes | None
    arguments: bytes
    generators: GeneratorStates


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a worker returns.

    Attributes:
        values: what the function returned, as a list of numbers and None; None if it failed.
        failure: None if it returned.
        stays: why the function cannot run in a worker; empty if it can. The call counts as not made.
        records: calls of `log_extra` and `log_metric`, in order: (name of the argument, arguments, keyword
            arguments).
        generators: states after the call; None if it failed.
        seconds: how long the function took.
        anonymous_bytes: memory of the worker that is its own.
        left_processes: processes that it has started and that still exist.
    """

    values: list[Any] | None = None
    failure: Failure | None = None
    stays: str = ""
    records: list[tuple[str, tuple[Any, ...], dict[str, Any]]]
    generators: GeneratorStates | None = None
    seconds: float = 0.0
    anonymous_bytes: int = 0
    left_processes: int = 0


def send_frame(sock: socket.socket, content: bytes) -> None:
    """Send one frame and block until it is sent."""
    sock.sendall(LENGTH.pack(len(content)))
    sock.sendall(content)


def receive_frame(sock: socket.socket) -> bytes | None:
    """Block until one frame is there and return it; None if the other side has closed."""
    header = receive_exactly(sock, LENGTH.size)
    if header is None:
        return None
    return receive_exactly(sock, LENGTH.unpack(header)[0])


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Block until so many bytes are there and return them; None if the other side has closed."""
    parts = bytearray()
    while len(parts) < size:
        chunk = sock.recv(min(_CHUNK_BYTES, size - len(parts)))
        if not chunk:
            return None
        parts += chunk
    return bytes(parts)


class FrameReader:
    """Collects one frame from a socket that does not block."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._content = bytearray()

    def read(self) -> bytes | None:
        """Return the frame if it is complete now, else None.

        Raises:
            ConnectionError: the other side has closed, or announces a frame that is too large.
        """
        while True:
            missing = self._missing()
            if missing == 0:
                frame = bytes(self._content[LENGTH.size :])
                self._content.clear()
                return frame
            try:
                chunk = self._socket.recv(min(_CHUNK_BYTES, missing))
            except BlockingIOError:
                return None
            if not chunk:
                raise ConnectionError("the worker has closed its connection")
            self._content += chunk

    def _missing(self) -> int:
        if len(self._content) < LENGTH.size:
            return LENGTH.size - len(self._content)
        size = LENGTH.unpack_from(self._content)[0]
        if size > MAX_FRAME_BYTES:
            raise ConnectionError(f"a worker announced {size} bytes")
        return int(LENGTH.size + size - len(self._content))


def send_frame_until(sock: socket.socket, content: bytes, deadline: float) -> None:
    """Send one frame on a socket that does not block.

    Args:
        deadline: monotonic seconds.

    Raises:
        TimeoutError: the other side did not read it in time.
        OSError: it has closed.
    """
    left = memoryview(LENGTH.pack(len(content)) + content)
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not poll.poll(seconds * 1000):
                raise TimeoutError("a worker did not read its task in time") from None
