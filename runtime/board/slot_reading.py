"""Consistent readings of the slots of a board, while their ranks write them.

A reader that sees an odd or changed sequence number reads again, and then returns its last consistent reading: a writer
may be interrupted in the middle of a write for any time (by garbage collection, by another thread of its interpreter,
by the kernel). This relies on the stores of one x86-64 thread becoming visible in order; under a weaker memory model a
torn reading is still detected unless every field tore in the same way. Used by `board.py`. Does not interpret slots.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.board.callback_table import CALLBACKS_BYTES, read_callback_name
from grpo_run.runtime.board.file_layout import FileLayout
from grpo_run.runtime.board.slot_layout import READING_BYTES, SEQUENCE, VERSION, read_slot, with_marks
from grpo_run.runtime.board.storage.board_bytes import BoardBytes
from grpo_run.watchdog.observation import Slot

READ_ATTEMPTS = 50


class SlotReadings:
    """The last consistent reading of each slot.

    Args:
        contents: the bytes of the board.
        layout: of the board.
    """

    def __init__(self, contents: BoardBytes, layout: FileLayout) -> None:
        self._contents = contents
        self._layout = layout
        self._readings: dict[int, tuple[tuple[int, bytes, bytes], Slot]] = {}

    def forget(self) -> None:
        """Forget every reading: the slots were cleared."""
        self._readings.clear()

    def read(self, index: int) -> Slot | None:
        """Return one consistent reading of a slot, or the last one with the marks of now; None if there is none."""
        offset = self._layout.slot(index)
        last = self._readings.get(index)
        raw = b""
        for _ in range(READ_ATTEMPTS):
            raw = self._contents.read(offset, READING_BYTES)
            version = VERSION.unpack_from(raw)
            if last is not None and last[0] == version:  # most slots do not change between two scans
                return last[1]
            before = version[0]
            if before == 0:
                return None
            raw = self._contents.read(offset, READING_BYTES)  # copied between two reads of the number
            (after,) = SEQUENCE.unpack(self._contents.read(offset, SEQUENCE.size))
            if before == after and before % 2 == 0:
                slot = read_slot(raw, before, self._callback_name(index))
                self._readings[index] = version, slot
                return slot
        return None if last is None else with_marks(last[1], raw)

    def _callback_name(self, index: int) -> Callable[[int], str]:
        callbacks_at = self._layout.callbacks(index)
        if callbacks_at is None:
            return lambda number: ""
        return lambda number: read_callback_name(self._contents.read(callbacks_at, CALLBACKS_BYTES), number)
