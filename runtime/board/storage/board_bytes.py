"""What every part of a board can rely on, however its bytes are reached. See `board_file.py` and `mapped_board.py`."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol


class BoardBytes(Protocol):
    """The bytes of one board file."""

    size_bytes: int
    """The size that the file should have."""

    @property
    def has_full_size(self) -> bool:
        """Whether the file has that size."""

    def is_at(self, path: Path) -> bool:
        """Whether the path names this file, and not another one of the same name."""

    @property
    def mapping(self) -> mmap.mmap:
        """The mapped file, for the writers of slots and for the addresses that ranks wait at.

        Raises:
            OSError, ValueError: it cannot be mapped.
        """

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of some bytes; zeros where the file was truncated or cannot be read. Not atomic beyond eight aligned bytes."""

    def write(self, offset: int, content: bytes) -> None:
        """Replace some bytes. Does nothing if the file was truncated."""
