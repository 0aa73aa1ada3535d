"""Take snapshots: copies of a checkpoint in memory, so that training does not wait for a disk.

The checkpoint is written as usual, but into a slot of the staging area, and
the bytes that torch and safetensors would write go to this rank's snapshot buffer (`capture`). A snapshot
costs two all-reduces:

    reserve   rank 0 chooses, locks and empties a slot; all ranks agree on it and on their `SaveFlags`
    copy      each rank copies its part; all ranks agree whether every copy succeeded

Then rank 0 declares the snapshot complete, and the supervisor writes it to disk. Called by `saver.py`, which
decides when.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import CheckpointError, NoHeadroomError
from grpo_run.runtime.rank.saving.copying import copy_threads
from grpo_run.runtime.rank.saving.interception import capture_saves
from grpo_run.runtime.rank.saving.reservation import (
    POLL_SECONDS,
    SLICE_SECONDS,
    WAIT_SECONDS,
    Reservation,
    Reserver,
    SaveFlags,
    Written,
)
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
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
    """The snapshots of one rank during one attempt. Its buffers stay mapped from one snapshot to the next.

    Args:
        staging: the run's staging area.
    """

    def __init__(self, session: Session, staging: StagingArea) -> None:
        self._session = session
        self.staging = staging
        self._reserver = Reserver(session, staging)
        self._buffers: dict[int, SnapshotBuffer] = {}
        self._preparation: threading.Thread | None = None
        self._threads = copy_threads(session.local_world_size)
        self._warned_of_memory = False
        self.written = Written(session)
        self.cost_seconds = 0.0
        """How long the last snapshot blocked this rank, without waiting for a slot."""
        self.last: tuple[StagingSlot, StagedSnapshot] | None = None
        """The last snapshot taken. Set on rank 0 only."""

    def prepare(self, size_bytes: int) -> None:
        """Allocate this rank's memory for two slots in the background. Not collective.

        It takes about one second per GB.

        Args:
            size_bytes: approximate size of this rank's part of a checkpoint.
        """
        if size_bytes >= MINIMUM_PREPARED_BYTES and self._preparation is None:
            self._preparation = threading.Thread(
                target=self._prepare, args=(size_bytes,), daemon=True, name="grpo-run-snapshots"
            )
            self._preparation.start()

    def _prepare(self, size_bytes: int) -> None:
        for slot in self.staging.slots[:2]:  # the newest snapshot stays while the next one is written
            try:
                self._open_buffer(slot).reserve(size_bytes)
            except (NoHeadroomError, CheckpointError, OSError):
                return  # the first snapshot meets the same error and reports it

    def reserve(
        self, staged: StagedSnapshot, flags: SaveFlags, expected_bytes: int = 0
    ) -> AbstractContextManager[Reservation]:
        """Agree on a slot; see `Reserver.reserve`. Collective."""
        return self._reserver.reserve(staged, flags, expected_bytes)

    def copy(self, reservation: Reservation, staged: StagedSnapshot, write: Callable[[Path], Any]) -> bool:
        """Copy the checkpoint into the reserved slot. Collective: one all-reduce.

        An error other than a lack of memory is raised on its rank, before the vote: it ends the rank, and
        thereby the attempt.

        Args:
            staged: the snapshot that the slot is reserved for.
            write: saves this rank's part of the checkpoint; called with the checkpoint's directory.

        Returns:
            False if at least one rank had no memory for its part; equal on every rank.
        """
        slot, session = reservation.slot, self._session
        assert slot is not None, "no slot is reserved"
        lacks_memory = True
        folder = slot.files / staged.folder
        try:
            buffer = self._buffer(slot)
            buffer.begin()
            with capture_saves(buffer, folder, threads=self._threads) as index:
                write(folder)
            slot.index_path(session.rank).write_bytes(index.to_json())
            lacks_memory = False
        except (Exception, tensor_files.collective_save_error()) as error:
            # files that are not captured are written to the slot, which can be full too
            if not _is_lack_of_memory(error, slot.path):
                raise
            session.warn_in_journal(str(error))
        taken = not self.written.agree(lacks_memory=lacks_memory)
        if session.is_main:
            self._declare(slot, staged, taken=taken)
        self.cost_seconds = time.perf_counter() - reservation.began
        return taken

    def _declare(self, slot: StagingSlot, staged: StagedSnapshot, *, taken: bool) -> None:
        """Declare the snapshot complete, or free its memory, on rank 0. All ranks have finished writing."""
        try:
            if taken:
                self.last = None
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
        # another snapshot gets the slot only after this one was drained
        if slot.drained or slot.read_snapshot() != staged:
            return Durability.durable
        return Durability.given_up if self.staging.troubled else Durability.waiting

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

    def close(self) -> None:
        """Unmap the buffers. The memory remains, because it belongs to the run."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _buffer(self, slot: StagingSlot) -> SnapshotBuffer:
        if self._preparation is not None:
            self._preparation.join()
        try:
            return self._open_buffer(slot)
        except CheckpointError as error:
            raise NoHeadroomError(str(error)) from error

    def _open_buffer(self, slot: StagingSlot) -> SnapshotBuffer:
        known = self._buffers.get(slot.index)
        if known is not None and not known.is_at_path:
            # deleted by somebody who cleaned up: nobody could read what is written to it
            del self._buffers[slot.index]
            known.close()
        if slot.index not in self._buffers:
            self._buffers[slot.index] = SnapshotBuffer(slot.buffer_path(self._session.rank))
        return self._buffers[slot.index]


def _is_lack_of_memory(error: BaseException, folder: Path) -> bool:
    causes = tensor_files.save_errors(error)
    return any(isinstance(cause, NoHeadroomError) or is_full(cause, folder) for cause in causes)
