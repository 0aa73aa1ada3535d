"""Drain snapshots when they are due: while training, before and during a restart, and at the end.

    while training     scheduled snapshots, oldest first; the newest recovery snapshot if the last
                       checkpoint on disk is older than `DURABLE_SECONDS`, or if ranks have resumed from it
    before a restart   nothing; if an attempt could not load the newest snapshot from memory, that snapshot
    during a restart   nothing until the ranks have finished a step: they need every core to load
    at the end         every snapshot that is not superseded

Training never waits for the disk. A full disk raises an alert and is retried until it has free space; a disk
that hangs is reported as a stall. Called by the supervisor at every poll. `_drain_policy.py` chooses the
snapshot, `_drain_requests.py` speaks to the drain worker, which writes it and says what became of it.

Of several hosts, the one with rank 0 has the complete snapshots and writes them; the others keep theirs in
memory for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.history.events import CheckpointPublished
from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_policy import PublishedCheckpoints, next_to_drain, within_limits
from grpo_run.runtime.snapshots._drain_requests import DrainReports, DrainRequests, WriteEvent
from grpo_run.runtime.snapshots._drain_worker import DrainProcess
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import SnapshotName, StagedSnapshot, StagingSlot

POLL_SECONDS = 0.2
"""Minimum time between two reads of the slots; the supervisor polls more often."""
DURABLE_SECONDS = 1800.0
"""Maximum age of the last checkpoint on disk: memory survives processes but not the machine, and this bounds
the work that the loss of a machine costs."""
HOLD_SECONDS = 300.0
"""How long nothing is drained after ranks were started. Large models load in less; a script that prepares its
data for hours must not keep checkpoints in memory for as long."""
LOCK_SECONDS = 5.0
"""How long the lock of a slot may be held by a process that is ending, while no rank runs."""


class DrainScheduler:
    """Drains the snapshots of one run.

    Args:
        staging: the run's staging area.
        write: writes a journal event.
        warn: shows the user one sentence and writes it to the journal.
        preloaded: fork the drain worker from the forkserver that has imported torch.
    """

    def __init__(
        self,
        staging: StagingArea,
        *,
        write: WriteEvent,
        warn: Callable[[str], None],
        preloaded: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging = staging
        self._warn = warn
        self._clock = clock
        self._reports = DrainReports(staging, write=write, warn=warn)
        self._requests = DrainRequests(
            DrainProcess(staging.path, preloaded=preloaded),
            self._reports,
            on_published=self._handle_published,
            on_broken=self._handle_broken,
            clock=clock,
        )
        self._next_poll_at = 0.0
        self._durable_at = clock()
        self._broken: dict[int, StagedSnapshot] = {}
        self._published = PublishedCheckpoints()
        self._expected: StagedSnapshot | None = None
        self._held_until = 0.0
        self._resumed: StagedSnapshot | None = None
        self._unproven = False
        """No rank has finished a step since the last attempt began."""
        self.writes = True
        """Whether this host writes the checkpoints of the run: it has rank 0."""
        self.loads_from_disk = False
        """Whether the last attempt that was prepared loads from disk what an earlier one could not load."""
        self.keeps_parts = False
        """Whether the memory stays when the run ends here: other hosts are missing, and it may go on."""
        self.memory_is_short = False
        """Whether the newest snapshot is to be drained too, so that its memory can be freed."""
        self.last_failure: DrainFailed | None = None
        """Why the last `flush` gave up; None if it wrote everything."""

    @property
    def busy(self) -> bool:
        """A request is in progress."""
        return self._requests.busy

    @property
    def worker(self) -> DrainProcess:
        """The drain worker."""
        return self._requests.worker

    def poll(self, *, ranks_have_loaded: bool = True) -> None:
        """Receive replies and send the next request if one is due. Does not block.

        Args:
            ranks_have_loaded: the ranks of this attempt have loaded what they resume from.
        """
        if ranks_have_loaded:
            self._held_until = 0.0
            self._expected = None  # if it was offered, it could be loaded
            self._unproven = False
        now = self._clock()
        if now < self._next_poll_at or not self.writes:
            return
        self._next_poll_at = now + POLL_SECONDS
        self._requests.receive()
        if self.busy:
            self._requests.report_stall()
            return
        if now < max(self._requests.retry_at, self._held_until):
            return
        due = next_to_drain(
            self.staging.snapshots(),
            done=self._done,
            newest_first=self._resumed is not None,
            overdue=self.memory_is_short or now - self._durable_at >= DURABLE_SECONDS,
        )
        # else the ranks' end is to be seen first
        if due is not None and not self.worker.server_has_ended:
            self._requests.send(*due)

    def prepare_attempt(
        self, *, spare_memory: bool = False, host: int = 0, hosts: int = 1
    ) -> SnapshotName | None:
        """Return the snapshot that the next attempt loads from memory, or None if it loads from disk.

        One that was offered to an attempt which did not finish a step is written to disk and loaded from
        there, whatever the reason was; if the disk does not take it, it is offered again. No rank may be
        running. Blocks only while something is written.

        Args:
            spare_memory: ranks that load need more memory than ranks that train, and there is little. The
                newest snapshot is written to disk and loaded from there, and the memory of all is freed.
            host: the number of this host in the attempt.
            hosts: of the attempt. The ranks of several hosts choose the snapshot themselves, unless
                `loads_from_disk`.
        """
        tried, self._unproven = hosts > 1 and self._unproven, True
        self.loads_from_disk, self.writes = False, host == 0
        if not self.writes:
            self._requests.wait()
            return None
        self._requests.receive()
        self._held_until = self._clock() + HOLD_SECONDS
        if spare_memory:
            self._expected = self._resumed = None
            self.flush(newest_only=True)
            is_on_disk = self._due_to_resume() is None
            self.free_memory()
            if is_on_disk:
                self.loads_from_disk = True
                return None  # else the disk does not take it, and memory has the only copy
        offered = self._loadable()
        if offered is None or offered[0] == self._expected or (tried and offered[1].loaded):
            self.flush(newest_only=True)
            if self.last_failure is None:
                self.loads_from_disk = offered is not None
                return None
            offered = self._loadable()
        if offered is None:
            return None
        staged, slot = offered
        self._expected = staged
        self._resumed = None if slot.drained else staged
        return SnapshotName(slot=slot.index, order=staged.order)

    def _loadable(self) -> tuple[StagedSnapshot, StagingSlot] | None:
        """Return the newest readable snapshot, unless a rank has written a later checkpoint."""
        for staged, slot in self.staging.snapshots():
            if self._is_broken(staged, slot):
                continue
            if staged.files is None or (self._published.supersede(staged) and not slot.drained):
                return None
            try:
                slot.check_complete(staged)
            except CheckpointError as error:
                self._handle_broken(staged, slot.index, str(error))
                continue
            return staged, slot
        return None

    def flush(self, *, newest_only: bool) -> None:
        """Drain the newest snapshot, then the others. Blocks. No rank may be writing a snapshot.

        Waits as long as the disk makes progress, and gives up if it is full or hangs.

        Args:
            newest_only: a rank will resume; `poll` drains the others while training continues.
        """
        self.last_failure = None
        for _ in range(2 * len(self.staging.slots)):
            due = self._due_to_resume() if newest_only else self._due_at_end()
            if self.busy and not (newest_only and due is None):
                self._requests.wait()
                continue  # the request may have drained what is due
            if due is None:
                return
            self._requests.send(*due, DrainRequest(slot=due[1].index, last=not newest_only))
            failed = self._requests.wait()
            if failed is not None and not (failed.broken or failed.superseded):  # else the next one is tried
                self.last_failure = failed
                return

    def free_memory(self, *, keep_newest: bool = False) -> int:
        """Free the memory of snapshots that are on disk or superseded; return how many bytes that were. See
        `StagingArea`.
        """
        return self.staging.free_unneeded(self._done, keep_newest=keep_newest or not self.writes)

    def discard(self, call: int, from_step: int) -> list[int]:
        """Discard the snapshots in memory of a call from a step on; return their steps. No rank may be
        running.

        Args:
            call: the ordinal of the `train()` call.
            from_step: the first step that is discarded.
        """
        self._requests.wait()
        discarded = []
        for staged, slot in self.staging.snapshots():
            if staged.train_call.ordinal == call and staged.step >= from_step:
                with slot.locked(LOCK_SECONDS):
                    slot.begin_snapshot()
                discarded.append(staged.step)
        self._expected = self._resumed = None
        return discarded

    def record_published(
        self, call: int, step: int, *, taken_at: float | None = None, scheduled: bool = False
    ) -> None:
        """Record a checkpoint that a rank wrote to disk: recovery snapshots up to it need not be drained.

        Args:
            call: the ordinal of its `train()` call.
            step: its step.
            taken_at: when its state was the run's state, in seconds since the epoch; None for now.
            scheduled: the script has scheduled it.
        """
        self._durable_at = self._clock()
        taken_at = time.time() if taken_at is None else taken_at
        self._published.record(call, step, taken_at=taken_at, scheduled=scheduled)

    def note_published(self, event: CheckpointPublished) -> None:
        """Take into account that a rank has written a checkpoint to disk itself."""
        self.record_published(
            event.train_call or 0, event.step, taken_at=event.time, scheduled=event.scheduled
        )

    def unwritten(self) -> list[tuple[StagedSnapshot, StagingSlot]]:
        """Return the snapshots that matter and are not on disk, newest first."""
        snapshots = self._kept_at_end() if self.writes else []
        return [
            entry
            for entry in snapshots
            if not self._done(*entry) and (entry[0].must_reach_disk or entry == snapshots[0])
        ]

    def close(self) -> bool:
        """Stop the drain worker, and free the memory if every snapshot that matters is on disk.

        Returns:
            whether snapshots are kept in memory, because they could not be written to disk.
        """
        self._requests.stop_worker()
        if self.unwritten() or (self.keeps_parts and not self.writes and self.staging.has_parts):
            return True
        self.staging.clear()
        return False

    # ---- which snapshots are done or due ----

    def _done(self, staged: StagedSnapshot, slot: StagingSlot) -> bool:
        """Return True for a snapshot that is on disk, unreadable, or superseded by a checkpoint on disk; also
        for one that another host writes.
        """
        done = slot.drained or self._is_broken(staged, slot) or self._published.supersede(staged)
        return done or not self.writes

    def _is_broken(self, staged: StagedSnapshot, slot: StagingSlot) -> bool:
        return self._broken.get(slot.index) == staged

    def _due_to_resume(self) -> tuple[StagedSnapshot, StagingSlot] | None:
        """Return the newest readable snapshot, or None if a rank can already resume from it."""
        for staged, slot in self.staging.snapshots():
            if not self._is_broken(staged, slot):
                return None if self._done(staged, slot) else (staged, slot)
        return None

    def _due_at_end(self) -> tuple[StagedSnapshot, StagingSlot] | None:
        return next_to_drain(self._kept_at_end(), done=self._done, newest_first=True, overdue=False)

    def _kept_at_end(self) -> list[tuple[StagedSnapshot, StagingSlot]]:
        return within_limits(self.staging.snapshots(), broken=self._is_broken)

    # ---- what the worker has done ----

    def _handle_published(self, staged: StagedSnapshot, reply: DrainPublished) -> None:
        self.record_published(
            reply.train_call, reply.step, taken_at=staged.staged_at, scheduled=reply.scheduled
        )
        if self._resumed is not None and staged.order >= self._resumed.order:
            self._resumed = None
        self._reports.published(reply)

    def _handle_broken(self, staged: StagedSnapshot, index: int, reason: str) -> None:
        self._broken[index] = staged
        self._reports.broken(staged, reason, repeated=self._published.repeat(staged))
        slot = self.staging.slots[index]
        with suppress(OSError, CheckpointError), slot.locked() as acquired:
            # otherwise ranks wait for ever for the slot of a scheduled one to be drained
            if acquired and slot.read_snapshot() == staged:
                slot.free()
