"""When a checkpoint that the script saves with `Accelerator.save_state` is complete: on all ranks that save.

Some scripts call it on every rank, some on rank 0 only. Pure; reads the counts on the board. Called by `no_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.observation import Slot

SETTLE_SECONDS = 2.0
"""How long to wait for a rank that has never saved in this attempt: ranks reach the same line within a step's imbalance."""


class OwnSaves:
    """The saves of one attempt."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._complete: dict[int, int] = {}
        self._changed_at = 0.0

    def observe(self, slots: Mapping[int, Slot | None], now: float, *, ended: bool = False) -> bool:
        """Return whether a save is complete that was not complete before.

        Args:
            slots: of this node's ranks.
            now: monotonic seconds.
            ended: the ranks go no further, so no rank is waited for.
        """
        readings = {rank: slot for rank, slot in slots.items() if slot is not None}
        counts = {**self._counts, **{rank: slot.states_saved for rank, slot in readings.items()}}
        if counts != self._counts:
            self._counts, self._changed_at = counts, now
        new = {rank: count - self._complete.get(rank, 0) for rank, count in counts.items() if count}
        if is_saving(slots) or not new or min(new.values()) < 1:
            return False
        all_save = len(new) == len(slots)
        if not (all_save or ended or min(new.values()) > 1 or now - self._changed_at >= SETTLE_SECONDS):
            return False
        self._complete = counts
        return True


def is_saving(slots: Mapping[int, Slot | None]) -> bool:
    """Whether a rank is inside `Accelerator.save_state`."""
    return any(slot is not None and slot.saves_state for slot in slots.values())
