"""Where everything of a board file is.

    header | slots | callback tables | exchange areas | memory areas

Each part has one entry for each local rank; the last two begin at a multiple of 64 bytes. A board of an earlier version
ends before some of them. Used by `board.py` and `board.py`. What the entries hold is in a file for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.runtime.board.callback_table import CALLBACKS_BYTES
from grpo_run.runtime.board.exchange import EXCHANGE_BYTES
from grpo_run.runtime.board.header import HEADER_BYTES
from grpo_run.runtime.board.memory_area import MEMORY_AREA_BYTES
from grpo_run.runtime.board.slot_layout import SLOT_BYTES


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Offsets in a board.

    Args:
        slots: number of local ranks.
        size_bytes: of the file.
    """

    slots: int
    size_bytes: int

    @classmethod
    def of(cls, slots: int) -> FileLayout:
        """Return the layout of a new board."""
        return cls(slots, _memory_area_offset(slots, slots))

    def slot(self, index: int) -> int:
        """Where the slot of local rank `index` begins."""
        return HEADER_BYTES + index * SLOT_BYTES

    @property
    def slots_end(self) -> int:
        """Where the last slot ends."""
        return self.slot(self.slots)

    def callbacks(self, index: int) -> int | None:
        """Where the callback table of local rank `index` begins; None on a board of an earlier version."""
        offset = self.slots_end + index * CALLBACKS_BYTES
        return offset if offset + CALLBACKS_BYTES <= self.size_bytes else None

    @property
    def has_exchange(self) -> bool:
        """Whether there is an exchange area."""
        return self.size_bytes >= self.exchange(self.slots)

    def exchange(self, index: int) -> int:
        """Where local rank `index`'s part of the exchange area begins, if there is one."""
        return _exchange_offset(self.slots, index)

    def memory_area(self, index: int) -> int | None:
        """Where the memory of local rank `index` begins; None on a board of an earlier version."""
        offset = _memory_area_offset(self.slots, index)
        return offset if offset + MEMORY_AREA_BYTES <= self.size_bytes else None


def _exchange_offset(slots: int, index: int) -> int:
    tables_end = HEADER_BYTES + slots * (SLOT_BYTES + CALLBACKS_BYTES)
    return -(-tables_end // 64) * 64 + index * EXCHANGE_BYTES


def _memory_area_offset(slots: int, index: int) -> int:
    exchange_end = _exchange_offset(slots, slots)
    return -(-exchange_end // 64) * 64 + index * MEMORY_AREA_BYTES
