"""What all ranks agree on before and after a save: the at most two all-reduces of a snapshot.

Each rank fills in what it knows; the maximum over all ranks is the same on every rank, so all ranks take the
same branch. Used by `saver.py`, `snapshots.py` and `direct.py`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from grpo_run.trainers.rank.session import Session
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


class Written:
    """The agreement of all ranks that each has written its part.

    Args:
        session: of the rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.stop_requested = False
        """Whether a stop was requested on any rank before the last agreement; equal on every rank."""

    def agree(self, *, lacks_memory: bool = False) -> bool:
        """Wait for all ranks. Collective: one all-reduce.

        Args:
            lacks_memory: this rank's memory did not hold its part.

        Returns:
            whether any rank lacks memory.
        """
        stop, _ = self._session.board.requests
        lacks, stops = self._session.votes.maxima([int(lacks_memory), int(stop)])
        self.stop_requested = bool(stops)
        return bool(lacks)
