"""Requests to the drain worker, one at a time, and reports of what became of them.

A request is sent and awaited, and abandoned if the worker dies or the disk hangs. Published checkpoints and
failed drains are reported to the user, the ranks and the journal. A failure is reported once, until a
checkpoint is written again or the cause changes; while the disk is in trouble, a note in the staging area
tells the ranks. Called by `drain_scheduler.py`, which chooses what is requested. Does not choose, and does
not retry by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import CheckpointFailed, CheckpointPublished
from grpo_run.runtime.snapshots._drain_messages import (
    DrainFailed,
    DrainProgress,
    DrainPublished,
    DrainRequest,
)
from grpo_run.runtime.snapshots._drain_worker import DrainProcess
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot, path_of
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.json_values import to_json

WriteEvent = Callable[[Event], object]
"""Writes an event to the journal."""


class DrainReports:
    """Reports the drains of one run.

    Args:
        staging: the run's staging area, whose ranks see whether the disk is in trouble.
        write: writes a journal event.
        warn: shows the user one sentence and writes it to the journal.
    """

    def __init__(self, staging: StagingArea, *, write: WriteEvent, warn: Callable[[str], None]) -> None:
        self._staging = staging
        self._write = write
        self._warn = warn
        self._trouble: Cause | None = None
        staging.set_trouble(None)  # clears what an earlier supervisor wrote

    @property
    def stalled(self) -> bool:
        """Whether the disk has hung, and no checkpoint was written since."""
        return self._trouble is Cause.checkpoint_stall

    def alert(self, staged: StagedSnapshot, sentence: str, cause: Cause) -> None:
        """Report a failure once, until a checkpoint is written again or the cause changes."""
        if cause is self._trouble:
            return
        self._trouble = cause
        self._failed(staged, sentence, cause)
        # afterwards: a rank that sees it may discard a snapshot at once, and its report follows this one
        self._staging.set_trouble(cause, sentence)

    def broken(self, staged: StagedSnapshot, reason: str, *, repeated: bool) -> None:
        """Report a snapshot that cannot be read, so that its checkpoint is lost.

        Args:
            repeated: a later attempt has taken the same step again, and that checkpoint is on disk.
        """
        what = "was written by a later attempt" if repeated else "is lost"
        self._failed(
            staged,
            f"{path_of(staged)} {what}, its snapshot in memory cannot be read: {reason}.",
            Cause.checkpoint_corrupt,
            lost=staged.scheduled and not repeated,
        )

    def published(self, reply: DrainPublished) -> None:
        """Write that a checkpoint was published, which ends the trouble."""
        if self._trouble is not None:
            self._trouble = None
            self._staging.set_trouble(None)
            self._warn(f"checkpoints are written to disk again: {reply.path}")
        fields = to_json(reply)
        del fields["slot"]
        self._write(CheckpointPublished(verified=True, **fields))

    def _failed(self, staged: StagedSnapshot, sentence: str, cause: Cause, *, lost: bool = False) -> None:
        self._write(
            CheckpointFailed(
                step=staged.step,
                cause=str(cause),
                reason=sentence,
                path=str(path_of(staged)),
                train_call=staged.train_call.ordinal,
                lost=lost,
            )
        )
        self._warn(sentence)


RETRY_SECONDS = 30.0
"""Wait after a failed drain."""
STALL_SECONDS = 60.0
"""Time without progress that counts as a stall. A slow device makes some progress; NFS first retries after 60
s (nfs(5), timeo=600)."""
UNSEEN_SECONDS = 5.0
"""A longer gap between two looks was not observed, as when the whole job was suspended, and does not
count."""
STOP_SECONDS = 5.0
"""How long the drain worker may take to exit before it is killed."""


class DrainRequests:
    """The request in progress, and the latest one.

    Args:
        worker: the drain worker of the run.
        reports: receives failures.
        on_published: called with the snapshot of a request and the reply that it was published.
        on_broken: called with a snapshot that cannot be read, its slot and the reason.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        worker: DrainProcess,
        reports: DrainReports,
        *,
        on_published: Callable[[StagedSnapshot, DrainPublished], None],
        on_broken: Callable[[StagedSnapshot, int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.retry_at = 0.0
        """No request should be sent sooner; monotonic seconds."""
        self._reports = reports
        self._on_published = on_published
        self._on_broken = on_broken
        self._clock = clock
        self._request: DrainRequest | None = None
        self._requested: StagedSnapshot | None = None
        self._silent_seconds = self._looked_at = 0.0

    @property
    def busy(self) -> bool:
        """A request is in progress."""
        return self._request is not None

    def send(self, staged: StagedSnapshot, slot: StagingSlot, request: DrainRequest | None = None) -> None:
        """Send a request, by default to write the snapshot to disk. No other one may be in progress."""
        self._request = request or DrainRequest(slot=slot.index)
        self._requested = staged
        self._silent_seconds, self._looked_at = 0.0, self._clock()
        try:
            self.worker.send(self._request)
        except (OSError, EOFError) as error:
            self._abandon(f"{self._name()} could not be written: the drain worker did not start: {error}")

    def wait(self) -> DrainFailed | None:
        """Wait for the current request while it makes progress. Return its reply if it failed."""
        while self.busy:
            failed = self.receive(0.1)
            if failed is not None:
                return failed
            if self.busy and self._is_stalled():
                return self._abandon(
                    f"writing {self._name()} has made no progress for {STALL_SECONDS:.0f} s",
                    Cause.checkpoint_stall,
                )
        return None

    def receive(self, wait_seconds: float = 0.0) -> DrainFailed | None:
        """Process replies, waiting up to `wait_seconds` for each. Return the reply if the request failed."""
        while self._request is not None:
            try:
                reply = self.worker.receive(wait_seconds)
            except (EOFError, OSError):
                return self._abandon(f"{self._name()} could not be written: the drain worker died")
            if reply is None:
                return None
            self._silent_seconds, self._looked_at = 0.0, self._clock()
            if isinstance(reply, DrainProgress):
                continue
            self._request = None
            if isinstance(reply, DrainFailed):
                self._handle_failure(reply)
                return reply
            self._on_published(self._snapshot, reply)
        return None

    def report_stall(self) -> None:
        """Report the request in progress if it has made no progress for long. It continues."""
        if self._is_stalled():
            self._alert(
                f"writing {self._name()} has made no progress for {STALL_SECONDS:.0f} s; training continues,"
                " and its snapshots stay in memory",
                Cause.checkpoint_stall,
            )

    def stop_worker(self) -> None:
        """Stop the drain worker; the next request starts it again."""
        # a worker stuck on the disk does not exit by itself
        self.worker.stop(0.0 if self._reports.stalled else STOP_SECONDS)

    def _is_stalled(self) -> bool:
        """Look again at how long nothing has been received. Call it after receiving."""
        now = self._clock()
        self._silent_seconds += now - self._looked_at if now - self._looked_at <= UNSEEN_SECONDS else 0.0
        self._looked_at = now
        return self._silent_seconds > STALL_SECONDS

    def _handle_failure(self, reply: DrainFailed) -> None:
        if reply.broken:
            self._on_broken(self._snapshot, reply.slot, reply.reason)
            return
        if reply.superseded:
            return
        self.retry_at = self._clock() + RETRY_SECONDS
        if reply.step is not None:  # otherwise a rank reused the slot first, which is not a disk error
            prefix, cause = ("the disk is full: ", Cause.disk_full) if reply.full else ("", Cause.unknown)
            self._alert(f"{self._name()} could not be written: {prefix}{reply.reason}", cause)

    def _abandon(self, sentence: str, cause: Cause = Cause.unknown) -> DrainFailed:
        """Give up the current request and stop the drain worker."""
        assert self._request is not None
        self.stop_worker()
        failed = DrainFailed(slot=self._request.slot, step=None, reason=sentence)
        self._request = None
        self.retry_at = self._clock() + RETRY_SECONDS
        self._alert(sentence, cause)
        return failed

    def _alert(self, sentence: str, cause: Cause) -> None:
        self._reports.alert(self._snapshot, sentence, cause)

    @property
    def _snapshot(self) -> StagedSnapshot:
        """The snapshot of the latest request."""
        assert self._requested is not None
        return self._requested

    def _name(self) -> str:
        return str(path_of(self._snapshot))
