"""The board's field for what was proved of ranks that do not make the same calls, as one sentence.

One record in the header: the attempt, a length and a text. The supervisor writes it at most once in an attempt, right
before it ends the ranks; those that wait in the exchange area (`exchange.py`) read it and raise it. Does not prove.
"""

from __future__ import annotations

import struct

from grpo_run.runtime.board.storage.board_bytes import BoardBytes

FIELD_AT = 2560
MAX_TEXT_BYTES = 1024

_HEAD = struct.Struct("<QI")  # attempt plus one, or 0 for no text; length of the text


def write_disagreement(contents: BoardBytes, attempt: int, text: str) -> None:
    """Publish a text; a longer one than the field holds loses its end."""
    raw = text.encode(errors="replace")[:MAX_TEXT_BYTES]
    contents.write(FIELD_AT + _HEAD.size, raw)
    contents.write(FIELD_AT, _HEAD.pack(attempt + 1, len(raw)))


def read_disagreement(contents: BoardBytes, attempt: int) -> str:
    """Return the text of an attempt; empty if there is none."""
    written, length = _HEAD.unpack(contents.read(FIELD_AT, _HEAD.size))
    if written != attempt + 1:
        return ""
    return contents.read(FIELD_AT + _HEAD.size, min(length, MAX_TEXT_BYTES)).decode(errors="replace")
