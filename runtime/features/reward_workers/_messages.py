"""Messages between rank, host, keeper and worker, and the channels that they travel through.

A channel is a socket that keeps the bounds of messages. The content of a message is a file in memory, and its
descriptor is sent: nobody ever waits for a reader, and a process that is killed while it writes has sent
nothing. Beats are messages without content. Does not interpret what a message contains.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from grpo_run.runtime.features.reward_workers.events import FailureKind
from grpo_run.runtime.rank.generators import GeneratorStates

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""A worker that sends more is broken."""
MAX_DESCRIPTORS = 3
_MESSAGE, _BEAT = b"m", b"b"


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
        seconds: until the function returned or raised; 0 if it did neither.
    """

    values: list[Any] | None = None
    failure: Failure | None = None
    stays: str = ""
    records: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]] = ()
    generators: GeneratorStates | None = None
    seconds: float = 0.0


class Arrived(NamedTuple):
    """What has arrived; `content` is empty and there are no descriptors if it is a beat."""

    content: bytes
    descriptors: list[int]


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, content: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message. Does not wait for its reader.

    Args:
        channel: one end.
        content: any bytes.
        descriptors: at most two, which the receiver gets copies of.

    Raises:
        OSError: the other side has closed, or no descriptor is left.
    """
    with open(os.memfd_create("grpo-run-message", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        socket.send_fds(channel, [_MESSAGE], [file.fileno(), *descriptors])


def send_beat(channel: socket.socket) -> None:
    """Send a sign of life, which needs no descriptor. Raises OSError as `send` does."""
    channel.send(_BEAT)


def receive(channel: socket.socket) -> Arrived | None:
    """Return the next message; None if the other side has closed.

    Raises:
        TimeoutError: the channel has a timeout, which is over.
        ConnectionError: the message is too large.
        OSError: no descriptor is left.
    """
    mark, descriptors, flags, _ = socket.recv_fds(channel, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(errno.EMFILE, "no descriptor is left for a message")
    if mark != _MESSAGE:
        return Arrived(b"", []) if mark else None
    memory, *others = descriptors
    with open(memory, "rb") as file:
        if os.fstat(memory).st_size > MAX_MESSAGE_BYTES:
            raise ConnectionError("a message is too large")
        file.seek(0)  # the position is the writer's too
        return Arrived(file.read(), others)
