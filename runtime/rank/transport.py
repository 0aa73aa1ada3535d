"""The interface of a transport, and its implementation for one node through the board's exchange area.

With a transport, every rank sends a row of integers and receives those of all ranks. `gloo_transport.py`
implements it for several nodes; `vote.py` uses both. The shared-memory transport needs no thread and no
connection. A rank that finds the votes of all others does not wait. One that must wait sleeps in the kernel
until a peer has voted: its count of context switches stays the same, as a proof of a deadlock requires.

A peer that dies sends nothing more, and nothing here notices it: the supervisor sees its exit and ends the
attempt, or proves that this rank waits for it. Ranks that start different operations, or send different
numbers of integers, wait until that is proved, as in a Gloo group. What the supervisor has proved of a
consensus call is raised here.
"""

from __future__ import annotations

import functools
import struct
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from grpo_run.runtime.board.exchange import MAX_MESSAGE_BYTES, Exchange, Message
from grpo_run.runtime.errors import ConsensusError
from grpo_run.runtime.rank.collective_recorder import Integers, OwnLog, Recorder
from grpo_run.watchdog.deadlocks.positions import MIN_TIMEOUT_SECONDS

Finish = Callable[[], list[list[int]]]
"""Waits for a collective and returns its rows: of each rank, by rank, or a single row with the maximum of
each column.
"""


class Operation(str, Enum):
    """A collective, by torch's name of the process group method."""

    maxima = "allreduce"
    rows = "allgather"


class Transport(Protocol):
    """A transport of one rank. Every rank makes the same calls in the same order."""

    most_values: int
    """Number of integers that a rank can send at once."""

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Send this rank's integers, each below 2**63, and return at once.

        The returned function raises RuntimeError if a peer is gone or does not answer in time.
        """

    def close(self) -> None:
        """Release what the transport holds. No collective may be in progress on any rank."""


class Detached:
    """The transport in a process that was forked from a rank and is not the rank."""

    most_values = sys.maxsize

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Refuse."""
        raise RuntimeError("a process that was forked from a rank cannot vote for it")

    def close(self) -> None:
        """Do nothing."""


_KINDS = {operation: number for number, operation in enumerate(Operation, 1)}


class SharedMemoryTransport:
    """This rank's end of a channel on the board. All ranks are on this node, and local ranks are ranks.

    Args:
        exchange: the channel.
        name: of the group.
        rank: this rank.
        timeout_seconds: for one collective, from its start.
        recorder: logs the collectives.
    """

    most_values = MAX_MESSAGE_BYTES // 8

    def __init__(
        self, exchange: Exchange, *, name: str, rank: int, timeout_seconds: float, recorder: Recorder
    ) -> None:
        self._exchange = exchange
        self._peers = [peer for peer in range(exchange.ranks) if peer != rank]
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        limited = timeout_seconds < MIN_TIMEOUT_SECONDS
        self._log = OwnLog(recorder, name, world_size=exchange.ranks, limited=limited)
        self._sequence = 0

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Start a collective; see `Transport`."""
        self._sequence += 1
        sequence, deadline = self._sequence, time.monotonic() + self._timeout_seconds
        layout = _layout(len(values))
        number = self._log.issued(sequence, operation.value, Integers((len(values),)))
        own = Message(_KINDS[operation], layout.pack(*values))
        self._exchange.send(sequence, own)

        def finish() -> list[list[int]]:
            rows = [values] * (len(self._peers) + 1)
            for peer in self._peers:
                message = self._exchange.receive(peer, sequence)
                if message is None or not _fits(message, own):
                    message = self._wait(peer, sequence, own, number, deadline)
                rows[peer] = list(layout.unpack(message.content))
            self._log.completed(number)
            return rows

        return finish

    def _wait(self, peer: int, sequence: int, own: Message, number: int, deadline: float) -> Message:
        exchange = self._exchange
        with self._log.waits(number):
            while True:
                last = exchange.last(peer)
                message = exchange.receive(peer, sequence)
                if message is not None and _fits(message, own):
                    return message
                if exchange.disagreement:
                    raise ConsensusError(exchange.disagreement)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RuntimeError(
                        f"rank {peer} has not taken part in a vote within {self._timeout_seconds:g} s"
                    )
                exchange.wait(peer, last, remaining)

    def close(self) -> None:
        """Do nothing: the area belongs to the board, and peers may still read what this rank has sent."""


def _fits(message: Message, own: Message) -> bool:
    return message.kind == own.kind and len(message.content) == len(own.content)


@functools.cache
def _layout(values: int) -> struct.Struct:
    return struct.Struct(f"<{values}q")
