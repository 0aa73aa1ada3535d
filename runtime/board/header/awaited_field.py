"""The board's field for the rank that the others wait for: written by the supervisor, read by `grpo-run status`.

One record in the header, as JSON with a sequence number before it, which is odd during a write. Written only
when it changes. Called by `board.py`. Does not determine who is waited for (`watchdog.stalls.awaited`).
"""

from __future__ import annotations

import json
import struct

from grpo_run.runtime.board.storage.board_bytes import BoardBytes
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank

FIELD_AT = 256
MAX_TEXT_BYTES = 2048
MAX_CALLBACK_CHARACTERS = 200
MAX_WAITERS = 64
READ_ATTEMPTS = 10

_HEAD = struct.Struct("<QI")  # sequence number, length of the text


def write_awaited(contents: BoardBytes, awaited: AwaitedRank | None) -> None:
    """Replace the record; None clears it."""
    text = b"" if awaited is None else _encode(awaited)
    assert len(text) <= MAX_TEXT_BYTES
    sequence, _ = _HEAD.unpack(contents.read(FIELD_AT, _HEAD.size))
    sequence += 1 + sequence % 2
    contents.write(FIELD_AT, _HEAD.pack(sequence, 0))
    contents.write(FIELD_AT + _HEAD.size, text)
    contents.write(FIELD_AT, _HEAD.pack(sequence + 1, len(text)))


def read_awaited(contents: BoardBytes) -> AwaitedRank | None:
    """Return the record; None if there is none, or if it is damaged or of another version."""
    for _ in range(READ_ATTEMPTS):
        before, length = _HEAD.unpack(contents.read(FIELD_AT, _HEAD.size))
        text = contents.read(FIELD_AT + _HEAD.size, min(length, MAX_TEXT_BYTES))
        after, _ = _HEAD.unpack(contents.read(FIELD_AT, _HEAD.size))
        if before == after and before % 2 == 0:
            return _decode(text)
    return None


def _encode(awaited: AwaitedRank) -> bytes:
    fields = {
        "rank": awaited.rank,
        "phase": awaited.phase.name,
        "callback": awaited.callback[:MAX_CALLBACK_CHARACTERS],
        "since_seconds": awaited.since_seconds,
        "deadline_at_seconds": awaited.deadline_at_seconds,
        "busy": awaited.busy,
        "waiters": awaited.waiters[:MAX_WAITERS],
        "exiting": awaited.exiting,
    }
    return json.dumps(fields, ensure_ascii=False).encode(errors="replace")


def _decode(text: bytes) -> AwaitedRank | None:
    try:
        fields = json.loads(text)
        return AwaitedRank(
            rank=int(fields["rank"]),
            phase=Phase[fields["phase"]],
            callback=str(fields["callback"]),
            since_seconds=float(fields["since_seconds"]),
            deadline_at_seconds=float(fields["deadline_at_seconds"]),
            busy=None if fields["busy"] is None else bool(fields["busy"]),
            waiters=tuple(int(rank) for rank in fields["waiters"]),
            exiting=bool(fields["exiting"]),
        )
    except (ValueError, TypeError, LookupError):
        return None
