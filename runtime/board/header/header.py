"""The header of a board file: its format, the present attempt, and what is asked of the ranks and of the supervisor.

Base of `Board` (`board.py`). The supervisor sets the flags and the attempt; ranks read them at every vote. Commands in
other processes count requests up. Every field is written by one process alone, apart from the counts, which only grow.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

from grpo_run.runtime.board.slot_layout import SLOT_BYTES

MAGIC = b"GRPOBRD2"
HEADER_BYTES = 4096
REQUEST_STOP = 1
END_RANKS = 2
FREE_CACHES = 4

_HEADER = struct.Struct(
    "<8sIIIIQQ"
)  # magic, slots, slot bytes, attempt, requests, saves requested, created (ns)
_ATTEMPT_AT = 16
_REQUESTS_AT = 20
_SAVES_REQUESTED_AT = 24
_CREATED_AT = 32
_STOPS_AT = 40
"""Requests of `stop_requests.py`: how many were made, and how many the supervisor has taken."""


def write_header(memory: mmap.mmap, slots: int) -> None:
    """Write the header of a new board."""
    _HEADER.pack_into(memory, 0, MAGIC, slots, SLOT_BYTES, 0, 0, 0, time.monotonic_ns())


def read_shape(memory: mmap.mmap) -> tuple[int, int] | None:
    """Return the number of slots and the bytes of each; None if this is no board of this version."""
    if len(memory) < HEADER_BYTES or memory[:8] != MAGIC:
        return None
    _, slots, slot_bytes, *_ = _HEADER.unpack_from(memory, 0)
    return slots, slot_bytes


class BoardHeader:
    """The header of a mapped board.

    Args:
        memory: the mapping.
        descriptor: of the file, for the supervisor, whose mapping may outlive the file's size; None for a rank.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int | None = None) -> None:
        self._memory = memory
        self._descriptor = descriptor

    @property
    def attempt(self) -> int:
        """The attempt whose ranks may write here."""
        return int(struct.unpack_from("<I", self._memory, _ATTEMPT_AT)[0])

    def _start_attempt(self, attempt: int) -> None:
        """Set the attempt, and withdraw what was asked of the ranks."""
        struct.pack_into("<II", self._memory, _ATTEMPT_AT, attempt, 0)

    @property
    def has_full_size(self) -> bool:
        """Whether the file has its original size; access beyond the end of a mapped file raises SIGBUS."""
        return self._descriptor is None or os.fstat(self._descriptor).st_size >= len(self._memory)

    def request_stop(self) -> None:
        """Ask the ranks to agree on a step, save and exit. Every vote reads this request."""
        self._set_flag(REQUEST_STOP, True)

    def announce_end(self, announced: bool) -> None:
        """Tell the ranks whether they are about to be ended: a script's own save does not begin meanwhile."""
        self._set_flag(END_RANKS, announced)

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks are about to be ended."""
        return self._has_flag(END_RANKS)

    def announce_short_memory(self, short: bool) -> None:
        """Tell the ranks whether memory of the host is short: each frees its caches once, after its next step."""
        self._set_flag(FREE_CACHES, short)

    @property
    def memory_is_short(self) -> bool:
        """Whether memory of the host is short."""
        return self._has_flag(FREE_CACHES)

    def _set_flag(self, flag: int, value: bool) -> None:
        if not self.has_full_size:
            return  # the ranks that would read it end too
        (flags,) = struct.unpack_from("<I", self._memory, _REQUESTS_AT)
        struct.pack_into("<I", self._memory, _REQUESTS_AT, flags | flag if value else flags & ~flag)

    def _has_flag(self, flag: int) -> bool:
        (flags,) = struct.unpack_from("<I", self._memory, _REQUESTS_AT)
        return bool(flags & flag)

    def ask_to_stop(self) -> int:
        """Ask the supervisor to stop the run, as `grpo-run stop` does. Returns the number of this request."""
        (count,) = struct.unpack_from("<Q", self._memory, _STOPS_AT)
        struct.pack_into("<Q", self._memory, _STOPS_AT, count + 1)
        return int(count) + 1

    def take_stop(self) -> bool:
        """Take one request of `ask_to_stop`; return whether there was one."""
        asked, taken = struct.unpack_from("<QQ", self._memory, _STOPS_AT)
        if asked <= taken:
            return False
        struct.pack_into("<Q", self._memory, _STOPS_AT + 8, taken + 1)
        return True

    @property
    def stops_taken(self) -> int:
        """How many requests of `ask_to_stop` the supervisor has taken."""
        return int(struct.unpack_from("<Q", self._memory, _STOPS_AT + 8)[0])

    @property
    def created_ns(self) -> int:
        """When the board was created, on the monotonic clock: every supervisor creates a new one."""
        return int(struct.unpack_from("<Q", self._memory, _CREATED_AT)[0])

    def request_save(self) -> None:
        """Ask the ranks for one joint checkpoint at the next step they agree on."""
        (count,) = struct.unpack_from("<Q", self._memory, _SAVES_REQUESTED_AT)
        struct.pack_into("<Q", self._memory, _SAVES_REQUESTED_AT, count + 1)

    @property
    def requests(self) -> tuple[bool, int]:
        """(whether a stop is requested, number of saves requested so far)."""
        flags, saves = struct.unpack_from("<IQ", self._memory, _REQUESTS_AT)
        return bool(flags & REQUEST_STOP), saves
