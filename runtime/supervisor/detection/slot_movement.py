"""When each rank's slot last changed. Costs no system call; reads nothing but the slots it is given.

Kept by `detector.py` at every scan, and used by its parts: a rank whose slot changes does not stand still.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.observation import Slot

START_SECONDS = 30.0
"""A rank writes its slot within milliseconds if it is forked, and within some seconds as a fresh interpreter.
"""
UNREADABLE_SECONDS = 2.0
"""How long a slot that had been read must be unreadable before it is reported."""


class SlotMovement:
    """Signatures of slots over successive scans.

    One object per attempt. `unreadable` holds the reason for each slot that could not be read. A rank that is
    starting has no slot yet, and is not listed before `START_SECONDS` have passed; a slot that was read
    before, not before `UNREADABLE_SECONDS`. A change is dated by what the rank has written, as far as that lies
    between two scans: scans may be rare, and a rank that stands still is known from the moment it stopped.
    """

    def __init__(self) -> None:
        self._moved: dict[int, tuple[object, float]] = {}
        self._first_scan: float | None = None
        self._scanned_at: float | None = None
        self._read_at: dict[int, float] = {}
        self.unreadable: dict[int, str] = {}

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Compare the slots of a scan at `now` (monotonic seconds) with the previous scan."""
        if self._first_scan is None:
            self._first_scan = now
        for rank, slot in slots.items():
            if slot is None:
                if rank in self._read_at:
                    if now - self._read_at[rank] >= UNREADABLE_SECONDS:
                        self.unreadable[rank] = "its slot on the board cannot be read"
                elif now - self._first_scan >= START_SECONDS:
                    self.unreadable[rank] = (
                        f"it has not written its slot on the board for {START_SECONDS:.0f} s"
                    )
                continue
            self._read_at[rank] = now
            self.unreadable.pop(rank, None)
            signature = (slot.pid, slot.writes, slot.collectives_issued, slot.last_work_seconds)
            if self._moved.get(rank, (None, 0.0))[0] != signature:
                self._moved[rank] = (signature, self._changed_at(slot, now))
        self._scanned_at = now

    def _changed_at(self, slot: Slot, now: float) -> float:
        """When a slot changed that has changed since the last scan."""
        written = max(slot.last_progress_seconds, slot.last_work_seconds, slot.last_collective_seconds)
        return written if self._scanned_at is not None and self._scanned_at <= written <= now else now

    def restart(self, now: float) -> None:
        """Forget all signatures: every slot counts as moved at the next scan, at `now` (monotonic seconds)."""
        self._moved.clear()
        self._scanned_at = None
        self._read_at = dict.fromkeys(self._read_at, now)

    def still_seconds(self, rank: int, now: float) -> float:
        """How long the rank's slot has been unchanged; 0 if it was never read."""
        return now - self._moved[rank][1] if rank in self._moved else 0.0

    def moved_at(self, rank: int) -> float | None:
        """When the rank's slot last changed, in monotonic seconds; None if it was never read."""
        return self._moved[rank][1] if rank in self._moved else None

    def signatures(self, slots: Mapping[int, Slot | None]) -> tuple[object, ...]:
        """The current signatures of these ranks, for comparison with a later poll."""
        return tuple(self._moved.get(rank, (None,))[0] for rank in sorted(slots))
