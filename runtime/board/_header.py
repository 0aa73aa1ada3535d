"""The header of a board file: format, attempt, requests, and two fields of text.

Base of `Board` (`board.py`). The supervisor sets the flags and the attempt, which ranks read at every vote.
Commands in other processes increment request counts. One process alone writes each field, apart from the
counts, which only grow.

The first text field names the rank that the others wait for: JSON behind a sequence number, which is odd
during a write. It is written when it changes and read by `grpo-run status`; `watchdog/stalls/awaited.py`
determines the rank. The second is one sentence on ranks that were proved not to make the same calls. The
supervisor writes it at most once in an attempt, right before it ends the ranks; ranks that wait in
`exchange.py` read it and raise it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import time

from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board._storage import BoardBytes
from grpo_run.watchdog.json_values import from_json, to_json
from grpo_run.watchdog.stalls.awaited import AwaitedRank

MAGIC = b"GRPOBRD4"
HEADER_BYTES = 4096
REQUEST_STOP = 1
FREE_CACHES = 4

# magic, slots, slot bytes, attempt, requests, saves requested, created (ns)
_HEADER = struct.Struct("<8sIIIIQQ")
_COUNT = struct.Struct("<Q")
_NUMBER = struct.Struct("<I")
_REQUESTS = struct.Struct("<IQ")
_STOPS = struct.Struct("<QQ")
_ATTEMPT_AT = 16
_REQUESTS_AT = 20
_SAVES_REQUESTED_AT = 24
_CREATED_AT = 32
_STOPS_AT = 40
"""Requests of `stop_requests.py`: how many were made, and how many the supervisor has taken."""
AWAITED_FIELD_AT = 256
MAX_AWAITED_TEXT_BYTES = 2048
MAX_CALLBACK_CHARACTERS = 200
MAX_PLACE_CHARACTERS = 100
MAX_WAITERS = 64
READ_ATTEMPTS = 10

_AWAITED_HEAD = struct.Struct("<QI")  # sequence number, length of the text


def write_header(contents: BoardBytes, slots: int) -> None:
    """Write the header of a new board."""
    contents.write(0, _HEADER.pack(MAGIC, slots, SLOT_BYTES, 0, 0, 0, time.monotonic_ns()))


def read_shape(contents: BoardBytes) -> tuple[int, int] | None:
    """Return the number of slots and the bytes of each; None if this is no board of this version."""
    magic, slots, slot_bytes, *_ = _HEADER.unpack(contents.read(0, _HEADER.size))
    return (slots, slot_bytes) if magic == MAGIC and contents.size_bytes >= HEADER_BYTES else None


class BoardHeader:
    """The header of a board.

    Args:
        contents: the bytes of the board.
    """

    def __init__(self, contents: BoardBytes) -> None:
        self._contents = contents
        self._awaited: AwaitedRank | None = None

    @property
    def attempt(self) -> int:
        """The attempt whose ranks may write here."""
        return self._number(_ATTEMPT_AT)

    def _start_attempt(self, attempt: int) -> None:
        """Set the attempt, and withdraw what was asked of the ranks."""
        self._contents.write(_ATTEMPT_AT, struct.pack("<II", attempt, 0))

    @property
    def has_full_size(self) -> bool:
        """Whether the file has its original size. A truncated one reads as if no rank had written the missing
        part.
        """
        return self._contents.has_full_size

    def request_stop(self) -> None:
        """Ask the ranks to agree on a step, save and exit. Every vote reads this request."""
        self._set_flag(REQUEST_STOP, True)

    def announce_short_memory(self, short: bool) -> None:
        """Tell the ranks whether memory of the host is short: each frees its caches once, after its next
        step.
        """
        self._set_flag(FREE_CACHES, short)

    @property
    def memory_is_short(self) -> bool:
        """Whether memory of the host is short."""
        return self._has_flag(FREE_CACHES)

    def _set_flag(self, flag: int, value: bool) -> None:
        flags = self._number(_REQUESTS_AT)
        self._contents.write(_REQUESTS_AT, _NUMBER.pack(flags | flag if value else flags & ~flag))

    def _has_flag(self, flag: int) -> bool:
        return bool(self._number(_REQUESTS_AT) & flag)

    def ask_to_stop(self) -> int:
        """Ask the supervisor to stop the run, as `grpo-run stop` does. Returns the number of this request."""
        return self._count_up(_STOPS_AT)

    def take_stop(self) -> bool:
        """Take one request of `ask_to_stop`; return whether there was one."""
        asked, taken = _STOPS.unpack(self._contents.read(_STOPS_AT, _STOPS.size))
        if asked <= taken:
            return False
        self._contents.write(_STOPS_AT + 8, _COUNT.pack(taken + 1))
        return True

    @property
    def stops_taken(self) -> int:
        """How many requests of `ask_to_stop` the supervisor has taken."""
        return self._count(_STOPS_AT + 8)

    @property
    def created_ns(self) -> int:
        """When the board was created, on the monotonic clock: every supervisor creates a new one."""
        return self._count(_CREATED_AT)

    def request_save(self) -> None:
        """Ask the ranks for one joint checkpoint at the next step they agree on."""
        self._count_up(_SAVES_REQUESTED_AT)

    @property
    def requests(self) -> tuple[bool, int]:
        """(whether a stop is requested, number of saves requested so far)."""
        flags, saves = _REQUESTS.unpack(self._contents.read(_REQUESTS_AT, _REQUESTS.size))
        return bool(flags & REQUEST_STOP), saves

    def write_awaited(self, awaited: AwaitedRank | None) -> None:
        """Publish which rank the others wait for, for `grpo-run status`; None while nobody waits."""
        if awaited == self._awaited or not self.has_full_size:
            return
        self._awaited = awaited
        text = b"" if awaited is None else _encode(awaited)
        assert len(text) <= MAX_AWAITED_TEXT_BYTES
        sequence, _ = self._awaited_head()
        sequence += 1 + sequence % 2
        with contextlib.suppress(OSError):  # it is only shown
            self._contents.write(AWAITED_FIELD_AT, _AWAITED_HEAD.pack(sequence, 0))
            self._contents.write(AWAITED_FIELD_AT + _AWAITED_HEAD.size, text)
            self._contents.write(AWAITED_FIELD_AT, _AWAITED_HEAD.pack(sequence + 1, len(text)))

    def read_awaited(self) -> AwaitedRank | None:
        """Return the rank that the others wait for; None while nobody waits for long."""
        for _ in range(READ_ATTEMPTS):
            before, length = self._awaited_head()
            text = self._contents.read(
                AWAITED_FIELD_AT + _AWAITED_HEAD.size, min(length, MAX_AWAITED_TEXT_BYTES)
            )
            if (before, length) == self._awaited_head() and before % 2 == 0:
                try:
                    return from_json(AwaitedRank, json.loads(text))
                except ValueError:
                    return None  # there is none, or it is damaged
        return None

    def _awaited_head(self) -> tuple[int, int]:
        sequence, length = _AWAITED_HEAD.unpack(self._contents.read(AWAITED_FIELD_AT, _AWAITED_HEAD.size))
        return sequence, length

    def _number(self, offset: int) -> int:
        return int(_NUMBER.unpack(self._contents.read(offset, _NUMBER.size))[0])

    def _count(self, offset: int) -> int:
        return int(_COUNT.unpack(self._contents.read(offset, _COUNT.size))[0])

    def _count_up(self, offset: int) -> int:
        count = self._count(offset) + 1
        self._contents.write(offset, _COUNT.pack(count))
        return count


def _encode(awaited: AwaitedRank) -> bytes:
    short = dataclasses.replace(
        awaited,
        callback=awaited.callback[:MAX_CALLBACK_CHARACTERS],
        place=awaited.place[:MAX_PLACE_CHARACTERS],
        waiters=awaited.waiters[:MAX_WAITERS],
    )
    return json.dumps(to_json(short), ensure_ascii=False).encode(errors="replace")


DISAGREEMENT_FIELD_AT = 2560
MAX_DISAGREEMENT_TEXT_BYTES = 1024

_DISAGREEMENT_HEAD = struct.Struct("<QI")  # attempt plus one, or 0 for no text; length of the text


def write_disagreement(contents: BoardBytes, attempt: int, text: str) -> None:
    """Publish a text; a longer one than the field holds loses its end."""
    raw = text.encode(errors="replace")[:MAX_DISAGREEMENT_TEXT_BYTES]
    contents.write(DISAGREEMENT_FIELD_AT + _DISAGREEMENT_HEAD.size, raw)
    contents.write(DISAGREEMENT_FIELD_AT, _DISAGREEMENT_HEAD.pack(attempt + 1, len(raw)))


def read_disagreement(contents: BoardBytes, attempt: int) -> str:
    """Return the text of an attempt; empty if there is none."""
    written, length = _DISAGREEMENT_HEAD.unpack(contents.read(DISAGREEMENT_FIELD_AT, _DISAGREEMENT_HEAD.size))
    if written != attempt + 1:
        return ""
    return contents.read(
        DISAGREEMENT_FIELD_AT + _DISAGREEMENT_HEAD.size, min(length, MAX_DISAGREEMENT_TEXT_BYTES)
    ).decode(errors="replace")
