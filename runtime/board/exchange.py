"""Exchange of short messages among the ranks of one node, in an area behind the slots and callback tables.

A channel carries numbered messages: every rank sends message 1, receives those of all ranks, sends message 2, and so
on. Each rank writes only its own part of the area: for each channel a word with the attempt and the number of its last
message, and two buffers that its messages alternate between. A rank sends message N + 1 only after it has received
message N of all ranks, so nobody overwrites a buffer that another rank still has to read.

A message is complete before its word is stored. x86-64 makes the two stores visible in this order; under a weaker
memory model a reader may see the word first, finds that the checksum does not match, and reads again. The word is one
aligned store of eight bytes. Its attempt tells messages of an earlier attempt apart, although `Board.begin_attempt`
clears them. Used by `trainers.rank.transports`; the watchdog reads how many messages each rank has sent. Does not know
what a message means.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import time
import zlib
from typing import NamedTuple

from grpo_run.runtime.board import futex
from grpo_run.runtime.board.header.disagreement_field import read_disagreement
from grpo_run.runtime.board.storage.board_bytes import BoardBytes
from grpo_run.runtime.board.storage.mapped_board import MappedBoard

CHANNELS = ("grpo_run/vote", "grpo_run/consensus")
"""Names of the channels, in the order of their places in the area."""
MAX_MESSAGE_BYTES = 4096
LONGEST_WAIT_SECONDS = 30.0
"""A waiter looks at the word again after this time, even if nobody has woken it."""
READ_ATTEMPTS = 200
READ_PAUSE_SECONDS = 0.001
"""Together 0.2 s. A store becomes visible within microseconds."""

_WORD = struct.Struct("<Q")
_HEAD = struct.Struct("<QIII4x")  # word, kind, size, checksum
_SEQUENCE_BITS = 32
_SEQUENCE_MASK = 2**_SEQUENCE_BITS - 1
_BUFFERS_AT = 64  # the words that others poll have a cache line of their own
_BUFFER_BYTES = _HEAD.size + MAX_MESSAGE_BYTES
_CHANNEL_BYTES = -(-(_BUFFERS_AT + 2 * _BUFFER_BYTES) // 64) * 64
EXCHANGE_BYTES = len(CHANNELS) * _CHANNEL_BYTES
"""Size of one rank's part."""


class Message(NamedTuple):
    """A message: its kind, a number that the sender chooses, and its content."""

    kind: int
    content: bytes


class Exchange:
    """One rank's end of one channel.

    Args:
        memory: the board's writable mapping.
        areas: where each local rank's part begins, by local rank; divisible by 64.
        own: this rank's local rank.
        attempt: the attempt; messages of others are not received.
        channel: one of `CHANNELS`.
    """

    def __init__(self, memory: mmap.mmap, areas: list[int], *, own: int, attempt: int, channel: str) -> None:
        self._memory = memory
        self._places = [area + CHANNELS.index(channel) * _CHANNEL_BYTES for area in areas]
        self._own = own
        self._attempt = attempt
        self.ranks = len(areas)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._addresses = [begin + place for place in self._places]  # of the lower half of each word

    def send(self, sequence: int, message: Message) -> None:
        """Send this rank's message number `sequence` to all ranks, and wake those that wait for it.

        Args:
            sequence: one more than that of this rank's last message; from 1.
            message: with at most `MAX_MESSAGE_BYTES` of content.
        """
        assert len(message.content) <= MAX_MESSAGE_BYTES, f"{len(message.content)} bytes in one message"
        word = self._attempt << _SEQUENCE_BITS | sequence
        place = self._places[self._own]
        at = _buffer_at(place, sequence)
        size = len(message.content)
        checksum = _checksum(word, message.kind, message.content)
        self._memory[at + _HEAD.size : at + _HEAD.size + size] = message.content
        _HEAD.pack_into(self._memory, at, word, message.kind, size, checksum)
        _WORD.pack_into(self._memory, place, word)
        futex.wake(self._addresses[self._own])

    def last(self, rank: int) -> int:
        """Return the number of the last message that a rank has sent in this attempt; 0 for none."""
        return self._sequence_of(self._word(rank))

    def receive(self, rank: int, sequence: int) -> Message | None:
        """Return message number `sequence` of a rank; None if it has not been sent yet.

        Raises:
            RuntimeError: the message is damaged or was overwritten, so a rank has not received all messages in order.
        """
        if self.last(rank) < sequence:
            return None
        expected = self._attempt << _SEQUENCE_BITS | sequence
        at = _buffer_at(self._places[rank], sequence)
        for _ in range(READ_ATTEMPTS):
            word, kind, size, checksum = _HEAD.unpack_from(self._memory, at)
            if word == expected and size <= MAX_MESSAGE_BYTES:
                content = self._memory[at + _HEAD.size : at + _HEAD.size + size]
                if _checksum(word, kind, content) == checksum:
                    return Message(kind, content)
            time.sleep(READ_PAUSE_SECONDS)
        raise RuntimeError(
            f"message {sequence} of local rank {rank} on the board cannot be read; its last one is {self.last(rank)}"
        )

    def wait(self, rank: int, last: int, timeout_seconds: float) -> None:
        """Sleep while the last message of a rank is number `last`; may return earlier.

        Args:
            rank: local rank.
            last: as `last` has returned it.
            timeout_seconds: not negative.
        """
        word = self._word(rank)
        if self._sequence_of(word) == last:
            futex.wait(
                self._addresses[rank], word & _SEQUENCE_MASK, min(timeout_seconds, LONGEST_WAIT_SECONDS)
            )

    def wake_all(self) -> None:
        """Let everyone return who sleeps in `wait` on this channel."""
        for address in self._addresses:
            futex.wake(address)

    @property
    def disagreement(self) -> str:
        """What was proved of the ranks of this attempt, so that no further message will come; empty if nothing was."""
        return read_disagreement(MappedBoard(self._memory), self._attempt)

    def _word(self, rank: int) -> int:
        (word,) = _WORD.unpack_from(self._memory, self._places[rank])
        return int(word)

    def _sequence_of(self, word: int) -> int:
        return word & _SEQUENCE_MASK if word >> _SEQUENCE_BITS == self._attempt else 0


def messages_sent(contents: BoardBytes, area: int, attempt: int) -> dict[str, int]:
    """Return how many messages a rank has sent in an attempt, by channel; a channel without any is left out.

    Args:
        contents: the bytes of the board.
        area: where the rank's part begins.
        attempt: number of the attempt.
    """
    sent = {}
    for number, channel in enumerate(CHANNELS):
        (word,) = _WORD.unpack(contents.read(area + number * _CHANNEL_BYTES, _WORD.size))
        if word & _SEQUENCE_MASK and word >> _SEQUENCE_BITS == attempt:
            sent[channel] = word & _SEQUENCE_MASK
    return sent


def _buffer_at(place: int, sequence: int) -> int:
    return place + _BUFFERS_AT + sequence % 2 * _BUFFER_BYTES


def _checksum(word: int, kind: int, content: bytes) -> int:
    return zlib.crc32(content, word & _SEQUENCE_MASK ^ word >> _SEQUENCE_BITS ^ kind)
