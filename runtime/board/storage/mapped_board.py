"""A board as its ranks see it: a mapping, and no descriptor that a script could close.

A rank writes several times per step, and a store to a mapping costs less than a system call. A process that touches a
mapped page beyond the end of its file is killed by SIGBUS: if the file is truncated, the ranks end, and the next attempt
gets a new file. The supervisor must not end with them and uses `board_file.py`.
"""

from __future__ import annotations

import mmap
from pathlib import Path


class MappedBoard:
    """The bytes of a board, through a mapping.

    Args:
        mapping: of the whole file.
    """

    has_full_size = True
    """Not known without a descriptor."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.size_bytes = len(mapping)
        self.mapping = mapping

    def is_at(self, path: Path) -> bool:
        """Return True: not known without a descriptor."""
        return True

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of some bytes."""
        return self.mapping[offset : offset + size_bytes]

    def write(self, offset: int, content: bytes) -> None:
        """Replace some bytes."""
        self.mapping[offset : offset + len(content)] = content
