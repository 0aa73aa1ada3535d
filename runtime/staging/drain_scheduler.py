"""Drain snapshots when they are due, and handle a disk that is full, stuck or failing.

    while training     scheduled snapshots, oldest first; the newest recovery snapshot if the last checkpoint on disk is
                       older than `DURABLE_SECONDS`, or if ranks have resumed from it
    before a restart   nothing, if the next attempt can load the newest snapshot from memory; otherwise that snapshot
    during a restart   nothing until the ranks have finished a step: they need every core to load
    at the end         every snapshot that is not superseded

Training never waits for the disk. A full disk raises an alert and is retried until it has free space; a disk
that hangs is reported as a stall. Before a restart, a snapshot that cannot be drained to disk is written as a
checkpoint in memory instead. Called by the supervisor at every poll. `drain_policy.py` chooses the snapshot;
the drain worker (`drain_worker.py`) writes it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any, Protocol

from grpo_run.runtime.checkpoints.manifest import MANIFEST
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.drain_messages import DrainFailed, DrainProgress, DrainPublished, DrainRequest
from grpo_run.runtime.staging.drain_policy import PublishedCheckpoints, next_to_drain
from grpo_run.runtime.staging.drain_worker import DrainProcess
from grpo_run.runtime.staging.slot import SnapshotName, StagedSnapshot, StagingSlot, path_of
from grpo_run.watchdog.causes import Cause

POLL_SECONDS = 0.2
"""Minimum time between two reads of the slots; the supervisor polls more often."""
DURABLE_SECONDS = 1800.0
"""Maximum age of the last checkpoint on disk: memory survives processes but not the machine, and this bounds
the work that the loss of a machine costs."""
RETRY_SECONDS = 30.0
"""Wait after a failed drain."""
STALL_SECONDS = 60.0
"""Time without progress that counts as a stall. A slow device makes some progress; NFS first retries after 60
s (nfs(5), timeo=600)."""
HOLD_SECONDS = 300.0
"""How long nothing is drained after ranks were started. Large models load in less; a script that prepares its data
for hours must not keep checkpoints in memory for as long."""
LOCK_SECONDS = 5.0
"""How long the lock of a slot may be held by a process that is ending, while no rank runs."""
STOP_SECONDS = 5.0
"""How long the drain worker may take to exit before it is killed."""


class WriteEvent(Protocol):
    """Write a journal event."""

    def __call__(
        self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any
    ) -> object: ...


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
        self.worker = DrainProcess(staging.path, preloaded=preloaded)
        self._write = write
        self._warn = warn
        self._clock = clock
        self._request: DrainRequest | None = None
        self._requested: StagedSnapshot | None = None
        self._last_reply_at = 0.0
        self._next_poll_at = 0.0
        self._retry_at = 0.0
        self._durable_at = clock()
        self._trouble: Cause | None = None
        self._restored: StagedSnapshot | None = None
        self._broken: dict[int, StagedSnapshot] = {}
        self._published = PublishedCheckpoints()
        self._expected: StagedSnapshot | None = None
        self._held_until = 0.0
        self._resumed: StagedSnapshot | None = None
        self.memory_is_short = False
        """Whether the newest snapshot is to be drained too, so that its memory can be freed."""
        staging.set_trouble(None)  # clears what an earlier supervisor wrote

    @property
    def busy(self) -> bool:
        """A request is in progress."""
        return self._request is not None

    def poll(self, *, ranks_have_loaded: bool = True) -> None:
        """Receive replies and send the next request if one is due. Does not block.

        Args:
            ranks_have_loaded: the ranks of this attempt have loaded what they resume from.
        """
        if ranks_have_loaded:
            self._held_until = 0.0
            self._expected = None  # if it was offered, it could be loaded
        now = self._clock()
        if now < self._next_poll_at:
            return
        self._next_poll_at = now + POLL_SECONDS
        self._receive(0.0)
        if self.busy:
            if now - self._last_reply_at > STALL_SECONDS:
                self._alert(
                    f"writing {self._name()} has made no progress for {STALL_SECONDS:.0f} s; training continues,"
                    " and its snapshots stay in memory",
                    Cause.checkpoint_stall,
                )
            return
        if now < max(self._retry_at, self._held_until):
            return
        due = next_to_drain(
            self.staging.snapshots(),
            done=self._done,
            newest_first=self._resumed is not None,
            overdue=self.memory_is_short or now - self._durable_at >= DURABLE_SECONDS,
        )
        if due is not None:
            self._send(*due)

    def prepare_attempt(self, world_size: int, *, spare_memory: bool = False) -> SnapshotName | None:
        """Return the snapshot that the next attempt loads from memory, or None after making it loadable from disk.

        Only a snapshot that each rank loads by itself is loaded from memory, by as many ranks as wrote it. One that
        was offered to an attempt which did not finish a step is not offered again, whatever the reason was. No rank
        may be running. Blocks only if it returns None.

        Args:
            world_size: number of ranks of the attempt.
            spare_memory: ranks that load need more memory than ranks that train, and there is little. The newest snapshot
                is written to disk and loaded from there, and the memory of all is freed.
        """
        self._receive(0.0)
        self._held_until = self._clock() + HOLD_SECONDS
        if spare_memory:
            self._expected = self._resumed = None
            self.flush(restore=True)
            is_on_disk = self._due_to_resume() is None
            self.free_memory()
            if is_on_disk:
                return None  # else the disk does not take it, and memory has the only copy
        for staged, slot in self.staging.snapshots():
            if self._is_broken(staged, slot):
                continue
            loadable = staged.loads_by_rank and staged.world_size == world_size and staged.files is not None
            superseded = self._published.supersede(staged) and not slot.drained
            if not loadable or superseded or staged == self._expected:
                break
            try:
                slot.check_complete(staged)
            except CheckpointError as error:
                self._report_broken(staged, slot.index, str(error))
                continue
            self._expected = staged
            self._resumed = None if slot.drained else staged
            return SnapshotName(slot=slot.index, order=staged.order)
        self.flush(restore=True)
        return None

    def flush(self, *, restore: bool) -> None:
        """Drain the newest snapshot, then the others. Blocks. No rank may be writing a snapshot.

        Waits as long as the disk makes progress, and gives up if it is full or hangs.

        Args:
            restore: a rank will resume. Drain the newest snapshot only, and write it as a checkpoint in
                memory if the disk does not accept it; `poll` drains the others while training continues.
        """
        for _ in range(2 * len(self.staging.slots)):
            due = self._due_to_resume() if restore else self._due_at_end()
            if self.busy and not (restore and due is None):
                self._wait()
                continue  # the request may have drained what is due
            if due is None:
                return
            self._send(*due)
            failed = self._wait()
            if failed is not None and not failed.broken:  # after a broken snapshot, the next one is tried
                if restore:
                    self._restore_in_memory(*due)
                return

    def free_memory(self, *, keep_newest: bool = False) -> int:
        """Free the memory of snapshots that are on disk or superseded; return how many bytes that were. See `StagingArea`."""
        return self.staging.free_unneeded(self._done, keep_newest=keep_newest)

    def discard(self, call: int, from_step: int) -> list[int]:
        """Discard the snapshots in memory of a call from a step on; return their steps. No rank may be running.

        Args:
            call: the ordinal of the `train()` call.
            from_step: the first step that is discarded.
        """
        self._wait()
        discarded = []
        for staged, slot in self.staging.snapshots():
            if staged.train_call.ordinal == call and staged.step >= from_step:
                with slot.locked(LOCK_SECONDS):
                    slot.begin_snapshot()
                discarded.append(staged.step)
        self._expected = self._resumed = None
        return discarded

    def record_published(self, call: int, step: int, *, taken_at: float | None = None) -> None:
        """Record a checkpoint that a rank wrote to disk: recovery snapshots up to it need not be drained.

        Args:
            call: the ordinal of its `train()` call.
            step: its step.
            taken_at: when its state was the run's state, in seconds since the epoch; None for now.
        """
        self._durable_at = self._clock()
        self._published.record(call, step, taken_at=time.time() if taken_at is None else taken_at)

    def note_event(self, record: dict[str, Any]) -> None:
        """Take an event of a rank into account: it may have written a checkpoint to disk itself."""
        if record["event"] == "checkpoint_published":
            call, step = int(record.get("train_call") or 0), int(record["step"])
            self.record_published(call, step, taken_at=record["time"])

    def close(self) -> bool:
        """Stop the drain worker, and free the memory if every snapshot that matters is on disk.

        Returns:
            whether snapshots are kept in memory, because they could not be written to disk.
        """
        self._stop_worker()
        if self._due_at_end() is None:
            self.staging.clear()
            return False
        self._warn(f"snapshots that could not be written to disk are kept in memory, in {self.staging.path}")
        return True

    # ---- which snapshots are done or due ----

    def _done(self, staged: StagedSnapshot, slot: StagingSlot) -> bool:
        """Return True for a snapshot that is on disk, unreadable, or superseded by a checkpoint on disk."""
        return slot.drained or self._is_broken(staged, slot) or self._published.supersede(staged)

    def _is_broken(self, staged: StagedSnapshot, slot: StagingSlot) -> bool:
        return self._broken.get(slot.index) == staged

    def _is_restored(self, staged: StagedSnapshot) -> bool:
        """Return True if this snapshot, not only one of the same name, is a checkpoint in memory."""
        return staged == self._restored and (self.staging.restore / staged.folder / MANIFEST).is_file()

    def _due_to_resume(self) -> tuple[StagedSnapshot, StagingSlot] | None:
        """Return the newest readable snapshot, or None if a rank can already resume from it."""
        for staged, slot in self.staging.snapshots():
            if not self._is_broken(staged, slot):
                return None if self._done(staged, slot) or self._is_restored(staged) else (staged, slot)
        return None

    def _due_at_end(self) -> tuple[StagedSnapshot, StagingSlot] | None:
        return next_to_drain(self.staging.snapshots(), done=self._done, newest_first=True, overdue=False)

    # ---- requests and replies ----

    def _restore_in_memory(self, staged: StagedSnapshot, slot: StagingSlot) -> None:
        self._restored = None
        shutil.rmtree(self.staging.restore, ignore_errors=True)  # an older checkpoint that no rank reads now
        self._send(staged, slot, DrainRequest(slot=slot.index, restore=str(self.staging.restore)))
        if self.busy and self._wait() is None:
            self._restored = staged

    def _send(self, staged: StagedSnapshot, slot: StagingSlot, request: DrainRequest | None = None) -> None:
        self._request = request or DrainRequest(slot=slot.index)
        self._requested = staged
        self._last_reply_at = self._clock()
        try:
            self.worker.send(self._request)
        except (OSError, EOFError) as error:
            self._abandon(f"{self._name()} could not be written: the drain worker did not start: {error}")

    def _wait(self) -> DrainFailed | None:
        """Wait for the current request while it makes progress. Return its reply if it failed."""
        while self.busy:
            if self._clock() - self._last_reply_at > STALL_SECONDS:
                return self._abandon(
                    f"writing {self._name()} has made no progress for {STALL_SECONDS:.0f} s",
                    Cause.checkpoint_stall,
                )
            failed = self._receive(0.1)
            if failed is not None:
                return failed
        return None

    def _receive(self, wait_seconds: float) -> DrainFailed | None:
        """Process replies, waiting up to `wait_seconds` for each. Return the reply if the request failed."""
        while self._request is not None:
            try:
                reply = self.worker.receive(wait_seconds)
            except (EOFError, OSError):
                return self._abandon(f"{self._name()} could not be written: the drain worker died")
            if reply is None:
                return None
            self._last_reply_at = self._clock()
            if isinstance(reply, DrainProgress):
                continue
            self._request = None
            if isinstance(reply, DrainFailed):
                self._handle_failure(reply)
                return reply
            self._handle_published(reply)
        return None

    def _handle_failure(self, reply: DrainFailed) -> None:
        if reply.broken:
            self._report_broken(self._snapshot, reply.slot, reply.reason)
            return
        self._retry_at = self._clock() + RETRY_SECONDS
        if reply.step is not None:  # otherwise a rank reused the slot first, which is not a disk error
            prefix, cause = ("the disk is full: ", Cause.disk_full) if reply.full else ("", Cause.unknown)
            self._alert(f"{self._name()} could not be written: {prefix}{reply.reason}", cause)

    def _handle_published(self, reply: DrainPublished) -> None:
        if reply.durable:
            self.record_published(reply.train_call, reply.step, taken_at=self._snapshot.staged_at)
            if self._resumed is not None and self._snapshot.order >= self._resumed.order:
                self._resumed = None
            if self._trouble is not None:
                self._trouble = None
                self.staging.set_trouble(None)
                self._warn(f"checkpoints are written to disk again: {reply.path}")
        self._write(
            "checkpoint_published",
            step=reply.step,
            path=reply.path,
            verified=True,
            train_call=reply.train_call,
            scheduled=reply.scheduled,
            kept=reply.kept,
            durable=reply.durable,
            size_bytes=reply.size_bytes,
            seconds=reply.seconds,
            removed=list(reply.removed),
        )

    def _abandon(self, sentence: str, cause: Cause = Cause.unknown) -> DrainFailed:
        """Give up the current request and stop the drain worker."""
        assert self._request is not None
        self._stop_worker()
        failed = DrainFailed(slot=self._request.slot, step=None, reason=sentence, full=False)
        self._request = None
        self._retry_at = self._clock() + RETRY_SECONDS
        self._alert(sentence, cause)
        return failed

    def _alert(self, sentence: str, cause: Cause) -> None:
        """Report a failure once, until a checkpoint is written again or the cause changes."""
        if cause is self._trouble:
            return
        self._trouble = cause
        self.staging.set_trouble(sentence)
        self._report_failure(self._snapshot, sentence, cause)

    def _report_broken(self, staged: StagedSnapshot, slot: int, reason: str) -> None:
        self._broken[slot] = staged
        self._report_failure(
            staged,
            f"{path_of(staged)} is lost, its snapshot in memory cannot be read: {reason}",
            Cause.checkpoint_corrupt,
        )

    def _report_failure(self, staged: StagedSnapshot, sentence: str, cause: Cause) -> None:
        self._write("checkpoint_failed", step=staged.step, cause=str(cause), reason=sentence)
        self._warn(sentence)

    @property
    def _snapshot(self) -> StagedSnapshot:
        """The snapshot of the latest request."""
        assert self._requested is not None
        return self._requested

    def _name(self) -> str:
        return str(path_of(self._snapshot))

    def _stop_worker(self) -> None:
        # a worker stuck on the disk does not exit by itself
        self.worker.stop(0.0 if self._trouble is Cause.checkpoint_stall else STOP_SECONDS)
