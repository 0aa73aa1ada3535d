"""Report drains to the user, the ranks and the journal: published checkpoints, and why others failed.

A failure is reported once, until a checkpoint is written again or the cause changes. While the disk is in trouble, a
note in the staging area tells the ranks. Called by `drain_scheduler.py` and `drain_requests.py`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.draining.drain_messages import DrainPublished
from grpo_run.runtime.staging.slot import StagedSnapshot, path_of
from grpo_run.watchdog.causes import Cause


class WriteEvent(Protocol):
    """Write a journal event."""

    def __call__(
        self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any
    ) -> object: ...


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
        self._staging.set_trouble(sentence)
        self._failed(staged, sentence, cause)

    def broken(self, staged: StagedSnapshot, reason: str) -> None:
        """Report a snapshot that cannot be read, so that its checkpoint is lost."""
        self._failed(
            staged,
            f"{path_of(staged)} is lost, its snapshot in memory cannot be read: {reason}.",
            Cause.checkpoint_corrupt,
            lost=staged.scheduled,
        )

    def published(self, reply: DrainPublished) -> None:
        """Write that a checkpoint was published. One on disk ends the trouble."""
        if reply.durable and self._trouble is not None:
            self._trouble = None
            self._staging.set_trouble(None)
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

    def _failed(self, staged: StagedSnapshot, sentence: str, cause: Cause, *, lost: bool = False) -> None:
        self._write(
            "checkpoint_failed",
            step=staged.step,
            cause=str(cause),
            reason=sentence,
            path=str(path_of(staged)),
            train_call=staged.train_call.ordinal,
            limit=staged.limit,
            lost=lost,
        )
        self._warn(sentence)
