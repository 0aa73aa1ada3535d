"""Take snapshots: copies of a checkpoint in memory, so that training does not wait for a disk.

The checkpoint is written as usual, but into a slot of the staging area, over the files of an earlier snapshot
(`_spare_files.py`). A snapshot costs two all-reduces:

    reserve   rank 0 chooses, locks and empties a slot; all ranks agree on it and on their `SaveFlags`
    write     each rank writes its part; all ranks agree whether every part is complete

Then rank 0 declares the snapshot complete, and the supervisor writes it to disk. On several hosts each has a
part, and the snapshot is complete on host 0 when all parts have been copied there (`copies.py`). Called by
`saver.py`, which decides when.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.saving._reservation import (
    POLL_SECONDS,
    SLICE_SECONDS,
    WAIT_SECONDS,
    Reservation,
    Reserver,
    SaveFlags,
    Written,
)
from grpo_run.runtime.rank.saving._spare_files import allocate, reuse_files
from grpo_run.runtime.rank.saving.copies import Copies
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import is_full
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot
from grpo_run.runtime.upstream import tensor_files

MINIMUM_PREPARED_BYTES = 64 << 20
"""The first snapshot allocates less memory than this within some tens of milliseconds."""


class Durability(enum.IntEnum):
    """Whether the last snapshot is on disk; the values that ranks vote on."""

    given_up = 0
    waiting = 1
    durable = 2


class Snapshots:
    """The snapshots of one rank during one attempt.

    Args:
        staging: the run's staging area on this host.
        copies: of the parts of several hosts; None if there is one.
    """

    def __init__(self, session: Session, staging: StagingArea, copies: Copies | None = None) -> None:
        self._session = session
        self.staging = staging
        self._copies = copies
        self._reserver = Reserver(session, staging, copies)
        self._preparation: threading.Thread | None = None
        self._warned_of_memory = False
        self.written = Written(session)
        self.cost_seconds = 0.0
        """How long the last snapshot blocked this rank, without waiting for a slot."""
        self.last: tuple[StagingSlot, StagedSnapshot] | None = None
        """The last snapshot taken. Set on rank 0 only."""

    def prepare(self, files: Mapping[str, int]) -> None:
        """Allocate memory for this rank's large files in two slots, in the background. Not collective.

        It takes about one second per GB.

        Args:
            files: about the size of each file in bytes, by its path in the checkpoint's directory.
        """
        if sum(files.values()) >= MINIMUM_PREPARED_BYTES and self._preparation is None:
            self._preparation = threading.Thread(
                target=self._prepare, args=(files,), daemon=True, name="grpo-run-snapshots"
            )
            self._preparation.start()

    def _prepare(self, files: Mapping[str, int]) -> None:
        for slot in self.staging.slots[:2]:  # the newest snapshot stays while the next one is written
            if slot.size_bytes() >= sum(files.values()):
                continue  # an earlier attempt has written it
            try:
                for name, size_bytes in files.items():
                    allocate(slot.spare / name, size_bytes)
            except (NoHeadroomError, OSError):
                return  # the first snapshot meets the same error and reports it

    def reserve(
        self, staged: StagedSnapshot, flags: SaveFlags, expected_bytes: int = 0
    ) -> AbstractContextManager[Reservation]:
        """Agree on a slot; see `Reserver.reserve`. Collective."""
        if self._preparation is not None:
            self._preparation.join()
        return self._reserver.reserve(staged, flags, expected_bytes)

    def write(self, reservation: Reservation, save: Callable[[Path], Any]) -> bool:
        """Write the checkpoint into the reserved slot. Collective: one all-reduce.

        An error other than a lack of memory is raised on its rank, before the vote: it ends the rank, and
        thereby the attempt.

        Args:
            save: writes this rank's part of the checkpoint; called with the checkpoint's directory.

        Returns:
            False if at least one rank had no memory for its part; equal on every rank.
        """
        slot, staged, session = reservation.slot, reservation.staged, self._session
        assert slot is not None, "no slot is reserved"
        lacks_memory = True
        folder = slot.files / staged.folder
        try:
            with reuse_files(folder, slot.spare):
                save(folder)
            lacks_memory = False
        except (Exception, tensor_files.collective_save_error()) as error:
            if not _is_lack_of_memory(error, slot.path):
                raise
            session.warn_in_journal(str(error))
        taken = not self.written.agree(lacks_memory=lacks_memory)
        if session.is_main or (self._copies is not None and session.leads_host):
            self._declare(slot, staged, taken=taken)
        self.cost_seconds = time.perf_counter() - reservation.began
        return taken

    def _declare(self, slot: StagingSlot, staged: StagedSnapshot, *, taken: bool) -> None:
        """Declare the snapshot complete, or free its memory, on rank 0. All ranks have finished writing."""
        try:
            if taken:
                self.last = None
                if self._copies is not None:
                    self._copies.begin(slot, staged)
                else:
                    staged = slot.record_files(staged)
                    slot.complete_snapshot()
                self.last = slot, staged
            else:
                slot.begin_snapshot()
        except OSError as error:  # the staging area was removed since the vote
            if taken:
                self._session.warn(f"the snapshot of step {staged.step} is lost: {error}")
            else:
                self._session.warn_in_journal(f"no snapshot: {error}")

    def await_copies(self) -> bool:
        """Wait until host 0 has all parts of what was taken. Collective on several hosts: one all-reduce.

        Returns:
            False if the last snapshot is not complete there.
        """
        if self._copies is None:
            return True
        self._copies.wait(self._session.config.timeouts.stop_seconds / 2)  # a save to disk may follow
        lacks = self._session.is_main and (self.last is None or self.last[0].read_snapshot() is None)
        if self._session.votes.maximum(int(lacks)):
            self.last = None
            return False
        return True

    def wait_durable(self, seconds: float = WAIT_SECONDS) -> bool:
        """Wait until the last snapshot is on disk. Collective.

        Returns:
            False if it was not on disk within `seconds`, or the disk is in trouble.
        """
        deadline = time.monotonic() + seconds
        while True:
            durability = Durability.given_up
            if self._session.is_main:
                vote_at = min(deadline, time.monotonic() + SLICE_SECONDS)
                while (durability := self._durability()) == Durability.waiting and time.monotonic() < vote_at:
                    self._session.slot.record_work()  # the watchdog sees that this rank waits on purpose
                    time.sleep(POLL_SECONDS)
                if durability == Durability.waiting and vote_at == deadline:
                    durability = Durability.given_up
            durability = Durability(self._session.votes.maximum(durability))
            if durability != Durability.waiting:
                return durability == Durability.durable

    def _durability(self) -> Durability:
        if self.last is None:
            return Durability.given_up
        slot, staged = self.last
        found = slot.read_snapshot()
        # another snapshot gets the slot only after this one was drained
        if slot.drained or (found is not None and found.order != staged.order):
            return Durability.durable
        if self._copies is not None and slot.index in self._copies.copying:
            return Durability.waiting
        gone = found is None  # it could not be read, and its memory was freed
        return Durability.given_up if gone or self.staging.trouble else Durability.waiting

    def warn_no_memory(self, step: int) -> None:
        """Warn, once per attempt, that a checkpoint did not fit into memory."""
        if not self._warned_of_memory:
            self._warned_of_memory = True
            self._session.warn(
                f"no memory for a snapshot at step {step}: the script's own checkpoints are written directly"
                " to disk, and a fault loses the steps since the last one. The journal names the limit; in a"
                " container it is often the size of /dev/shm (docker's --shm-size). --snapshot-dir selects"
                " another in-memory file system."
            )


def _is_lack_of_memory(error: BaseException, folder: Path) -> bool:
    causes = tensor_files.save_errors(error)
    return any(isinstance(cause, NoHeadroomError) or is_full(cause, folder) for cause in causes)
