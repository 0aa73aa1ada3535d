"""A few file descriptors kept in reserve, so that a fault can be handled when the process has no others.

While the supervisor only watches, a lack of descriptors costs it a reading or a scrape. Handling a fault and
starting ranks needs a dozen, and the attempt's store one for each connection of a rank. Held by the
supervisor. Does not raise the process's limit: the ranks inherit it, and programs that call select(2) fail
with descriptors above 1,023.
"""

from __future__ import annotations

import contextlib
import os

RESERVED = 24
"""Evidence reads a few files at a time, and the rendezvous opens a few connections."""
RESERVED_PER_RANK = 8
"""A started rank needs a pipe and a sentinel, and connects to the store for each process group."""


class DescriptorReserve:
    """The reserve of one process. It is full at first, as far as possible.

    Args:
        ranks: number of ranks on this node.
    """

    def __init__(self, ranks: int) -> None:
        self._count = RESERVED + RESERVED_PER_RANK * ranks
        self._held: list[int] = []
        self.fill()

    def release(self) -> None:
        """Make the descriptors available. May be called more than once."""
        while self._held:
            os.close(self._held.pop())

    def fill(self) -> None:
        """Take the descriptors back; those that are not available remain missing."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
