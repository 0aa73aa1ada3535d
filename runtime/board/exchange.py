"""Exchange short messages among the ranks of one node, and wait for them without using the CPU.

A channel carries numbered messages: every rank sends message 1, receives those of all ranks, sends message
2, and so on. A rank writes only its own part of the area: per channel one word, with the attempt and the
number of its last message, and two buffers that messages alternate between. It sends message N + 1 only
after it has received message N of all ranks, so nobody overwrites a buffer that is still to be read.

A message is complete before its word is stored by one aligned store of eight bytes. x86-64 makes the two
stores visible in this order; under a weaker memory model a reader that sees the word first finds a wrong
checksum and reads again. The attempt in the word tells earlier attempts apart, although
`Board.begin_attempt` clears the words. Waiting uses futex(2) on the mapped file, which Python does not
offer; where it is unknown or refused, waiters poll.

Used by `runtime/rank/transport.py`; the watchdog reads how many messages each rank has sent. Does not know
what a message means.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import struct
import time
import zlib
from typing import NamedTuple

from grpo_run.runtime.board._header import read_disagreement
from grpo_run.runtime.board._storage import BoardBytes

POLL_SECONDS = 0.001
"""Interval at which a waiter returns where futexes cannot be used."""

_NUMBERS = {"x86_64": 202, "aarch64": 98}  # asm/unistd.h
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not private: the word is shared with other processes
_EVERYBODY = 2**31 - 1
_EXPECTED = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_number = _NUMBERS.get(platform.machine()) if ctypes.sizeof(ctypes.c_void_p) == 8 else None
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_long,
]  # fmt: skip


def wait(address: int, expected: int, timeout_seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`; the interpreter's lock is released.

    Returns after a wake-up, after the time limit, after a signal, and at once if the word has another value.
    The caller reads the word again.

    Args:
        address: of the word, divisible by four.
        expected: the word's value as the caller has read it.
        timeout_seconds: not negative.
    """
    if _number is not None:
        limit = _Timespec(int(timeout_seconds), int(timeout_seconds % 1 * 1e9))
        if _syscall(_number, address, _FUTEX_WAIT, expected, ctypes.addressof(limit), None, 0) == 0:
            return
        if ctypes.get_errno() in _EXPECTED:
            return
    time.sleep(min(POLL_SECONDS, timeout_seconds))


def wake(address: int) -> None:
    """Wake all who wait for the word at `address`. Call it after the word has been changed."""
    if _number is not None:
        _syscall(_number, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)


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
        wake(self._addresses[self._own])

    def last(self, rank: int) -> int:
        """Return the number of the last message that a rank has sent in this attempt; 0 for none."""
        return self._sequence_of(self._word(rank))

    def receive(self, rank: int, sequence: int) -> Message | None:
        """Return message number `sequence` of a rank; None if it has not been sent yet.

        Raises:
            RuntimeError: the message is damaged or was overwritten, so a rank has not received all messages
                in order.
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
            f"message {sequence} of local rank {rank} on the board cannot be read; its last one is"
            f" {self.last(rank)}"
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
            wait(self._addresses[rank], word & _SEQUENCE_MASK, min(timeout_seconds, LONGEST_WAIT_SECONDS))

    def wake_all(self) -> None:
        """Let everyone return who sleeps in `wait` on this channel."""
        for address in self._addresses:
            wake(address)

    @property
    def disagreement(self) -> str:
        """What was proved of the ranks of this attempt, so that no further message will come; empty if
        nothing was.
        """
        return read_disagreement(BoardBytes(self._memory), self._attempt)

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
