"""What all ranks agree on before a save: the first of the at most two all-reduces of a snapshot.

Each rank fills in what it knows; the maximum over all ranks is the same on every rank, so all ranks take the
same branch. Used by `saver.py` and `snapshots.py`. The second all-reduce, after the copy, is in
`snapshots.py`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from grpo_run.trainers.saving.save_mode import SaveMode


@dataclass(frozen=True, kw_only=True)
class SaveFlags:
    """One rank's flags, or their maximum over all ranks. Fields are non-negative integers."""

    non_finite: bool
    """A weight is NaN or infinite: nothing is saved."""
    mode: SaveMode = SaveMode.in_memory
    disk_short: bool = False
    """Rank 0: the disk has no space for another checkpoint, so none is written directly."""
    slot: int = 0
    """Rank 0: a `SlotDecision`, see `snapshots.py`."""

    @property
    def forbid_snapshot(self) -> bool:
        """Whether no snapshot may be taken, whichever slots are free."""
        return self.non_finite or self.mode == SaveMode.directly

    def as_values(self) -> list[int]:
        """Return the values that are reduced, in the order of the fields."""
        return [int(value) for value in astuple(self)]

    def maximum(self, votes: Any) -> SaveFlags:
        """Return the maximum over all ranks. Collective: one all-reduce.

        Args:
            votes: the rank's vote group.
        """
        non_finite, mode, disk_short, slot = votes.maxima(self.as_values())
        return SaveFlags(
            non_finite=bool(non_finite), mode=SaveMode(mode), disk_short=bool(disk_short), slot=slot
        )
