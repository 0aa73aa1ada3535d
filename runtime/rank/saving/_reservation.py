"""Reserve a slot for a snapshot: what all ranks agree on before and after a save, in two all-reduces; on
several hosts in three, because each has slots of its own (`copies.py`).

Rank 0 chooses, locks and empties a slot before the vote. Each rank fills in what it knows as `SaveFlags`;
the maximum is the same on every rank, so all ranks take the same branch and learn the slot. Further votes
are needed only while rank 0 waits for a slot. Called by `snapshots.py`, which makes the second all-reduce
after the copy, and by `saver.py`.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.saving.contents import SaveMode
from grpo_run.runtime.rank.saving.copies import Copies, report_lost
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import least_headroom
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.text import size_text


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


WAIT_SECONDS = 1800.0
"""Maximum wait for the disk to take an earlier checkpoint that the script has scheduled."""
SLICE_SECONDS = 30.0
"""While rank 0 waits, the ranks vote this often, because a vote has a timeout of its own."""
POLL_SECONDS = 0.01

NO_SLOT, WAITING, NO_MEMORY, FIRST_SLOT = 0, 1, 2, 3
"""Rank 0's decision in `SaveFlags.slot`; a slot is encoded as `FIRST_SLOT` plus its index."""


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """What all ranks have agreed on before the copy."""

    flags: SaveFlags
    """The maximum over all ranks."""
    slot: StagingSlot | None
    """An empty slot that rank 0 has locked, or None."""
    began: float
    """`time.perf_counter()` when this rank stopped waiting for a slot."""
    staged: StagedSnapshot
    """The snapshot, equal on every rank."""

    @property
    def lacks_memory(self) -> bool:
        """Whether a slot was free, but there is no headroom for the checkpoint."""
        return self.flags.slot == NO_MEMORY and not self.flags.forbid_snapshot


class Reserver:
    """Reserves slots, on one rank.

    Args:
        staging: the run's staging area on this host.
        copies: of the parts of several hosts; None if there is one.
    """

    def __init__(self, session: Session, staging: StagingArea, copies: Copies | None = None) -> None:
        self._session = session
        self._staging = staging
        self._copies = copies

    @contextmanager
    def reserve(self, staged: StagedSnapshot, flags: SaveFlags, expected_bytes: int) -> Iterator[Reservation]:
        """Agree on a slot, which stays locked during the block. Collective.

        Without headroom for the complete checkpoint no slot is reserved: a rank that runs out of memory
        during the copy would make all ranks copy in vain.

        Args:
            staged: the snapshot to take.
            flags: of this rank.
            expected_bytes: approximate size of the checkpoint over all ranks.
        """
        deadline = time.monotonic() + (WAIT_SECONDS if staged.must_reach_disk else 0.0)
        copies, all_allow = self._copies, False
        if copies is not None:
            staged = staged.model_copy(update={"attempt": copies.attempt})
        with ExitStack() as lock:
            while True:
                decision = NO_SLOT
                if self._session.is_main and not flags.forbid_snapshot:
                    free = self._wait_for_slot(lock, deadline, may_discard=all_allow)
                    began = time.perf_counter()
                    decision = free if isinstance(free, int) else self._empty(free, staged, expected_bytes)
                agreed = replace(flags, slot=decision).maximum(self._session.votes)
                if agreed.forbid_snapshot or agreed.slot != WAITING:
                    break
                all_allow = True
            slot = None
            if not agreed.forbid_snapshot and agreed.slot >= FIRST_SLOT:
                slot = self._staging.slots[agreed.slot - FIRST_SLOT]
            if slot is not None and copies is not None:
                everywhere = copies.reserve(lock, slot, staged)
                if everywhere is None:
                    agreed, slot = replace(agreed, slot=NO_MEMORY), None
                else:
                    staged = everywhere
            if slot is None:
                lock.close()
            yield Reservation(
                flags=agreed,
                slot=slot,
                began=began if self._session.is_main and slot is not None else time.perf_counter(),
                staged=staged,
            )

    def _wait_for_slot(self, lock: ExitStack, deadline: float, *, may_discard: bool) -> StagingSlot | int:
        """Choose and lock a slot, on rank 0. Return `NO_SLOT`, or `WAITING` if all ranks must vote first.

        Args:
            may_discard: if the disk is in trouble, discard a scheduled snapshot that is not on disk. All
                ranks must have allowed the new snapshot before.
        """
        vote_at = min(deadline, time.monotonic() + SLICE_SECONDS)
        try:
            while True:
                troubled = self._staging.trouble is not None
                copying = self._copies.copying if self._copies is not None else ()
                slot = self._staging.choose_slot(sacrifice=troubled and may_discard, copying=copying)
                if slot is not None and lock.enter_context(slot.locked()):
                    return slot
                if troubled and not may_discard:
                    return WAITING
                if time.monotonic() >= vote_at:
                    return NO_SLOT if vote_at == deadline else WAITING
                self._session.slot.record_work()  # the watchdog sees that this rank waits on purpose
                time.sleep(POLL_SECONDS)
        except OSError as error:  # the staging area was removed
            self._session.warn_in_journal(f"no snapshot: {error}")
            return NO_SLOT

    def _empty(self, slot: StagingSlot, staged: StagedSnapshot, expected_bytes: int) -> int:
        """Empty the slot before any rank writes, on rank 0. Return the decision to vote on."""
        try:
            self._report_discarded(slot)
            slot.begin_snapshot()
            (slot.files / staged.folder).mkdir(parents=True)
            headroom = least_headroom(slot.path)
            if expected_bytes > slot.size_bytes() + headroom.usable_bytes:
                needed = f"about {size_text(expected_bytes)} are needed"
                raise OSError(errno.ENOSPC, f"{needed}, and {headroom.sentence}")
            # after the copy there may be no memory left to declare the snapshot complete
            slot.prepare_snapshot(staged)
        except OSError as error:
            self._session.warn_in_journal(f"no snapshot: {error}")
            return NO_MEMORY
        return FIRST_SLOT + slot.index

    def _report_discarded(self, slot: StagingSlot) -> None:
        """Journal that a checkpoint of the script is lost: the disk does not take it, and its memory is
        needed."""
        try:
            old = slot.read_snapshot()
        except CheckpointError:
            return
        if old is not None and old.scheduled and not slot.drained:
            reason = "the disk did not take the checkpoint, and memory was needed for newer ones."
            report_lost(self._session, old, self._staging.trouble or Cause.unknown, reason)
