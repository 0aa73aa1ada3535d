"""The board's field for what was proved of ranks that do not make the same calls, as one sentence.

One record in the header: the attempt, a length and a text. The supervisor writes it at most once in an attempt, right
before it ends the ranks; those that wait in the exchange area (`exchange.py`) read it and raise it. Does not prove.
"""

from __future__ import annotations

import mmap
import struct

FIELD_AT = 2560
MAX_TEXT_BYTES = 1024

_HEAD = struct.Struct("<QI")  # attempt plus one, or 0 for no text; length of the text


def write_disagreement(memory: mmap.mmap, attempt: int, text: str) -> None:
    """Publish a text; a longer one than the field holds loses its end."""
    raw = text.encode(errors="replace")[:MAX_TEXT_BYTES]
    start = FIELD_AT + _HEAD.size
    memory[start : start + len(raw)] = raw
    _HEAD.pack_into(memory, FIELD_AT, attempt + 1, len(raw))


def read_disagreement(memory: mmap.mmap, attempt: int) -> str:
    """Return the text of an attempt; empty if there is none."""
    written, length = _HEAD.unpack_from(memory, FIELD_AT)
    if written != attempt + 1:
        return ""
    start = FIELD_AT + _HEAD.size
    return memory[start : start + min(length, MAX_TEXT_BYTES)].decode(errors="replace")
