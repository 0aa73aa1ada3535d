"""The supervisor's side of draining: which snapshot is made durable when, and what happens when the disk will not have it.

    while training     what the script asked for, oldest first; a snapshot of ours when nothing durable is younger than
                       `DURABLE_SECONDS`
    before a restart   the newest snapshot, whatever it is: the next attempt resumes from it
    at the end         everything

Training never waits for a disk: a full one is an alert, tried again until there is room; one that hangs is reported as
a stall. Before a restart the newest snapshot then becomes a checkpoint in memory instead. Called by the supervisor at
every look; the work is the drainer's (`drain_worker.py`), a process that is started when there is something to do first.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from grpo_run.runtime import upstream
from grpo_run.runtime.checkpoints.manifest import MANIFEST
from grpo_run.runtime.staging.drain_worker import Answer, Failed, Progress, Published, Request, serve
from grpo_run.runtime.staging.slots import Slot, Staged, Staging
from grpo_run.watchdog.causes import Cause

LOOK_SECONDS = 0.2
DURABLE_SECONDS = 1800.0
"""Memory outlives processes, not machines: how much work the loss of one may cost beyond the script's own schedule."""
RETRY_SECONDS = 30.0
STALL_SECONDS = 60.0
"""Without a byte written. A device that is only slow writes some; NFS' own first retry comes after 60 s (`nfs(5)`, timeo=600)."""
CLOSE_SECONDS = 5.0


class Journal(Protocol):
    """The supervisor's way to write an event."""

    def __call__(
        self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any
    ) -> object: ...


def next_to_drain(
    snapshots: Sequence[tuple[Staged, Slot]],
    *,
    done: Callable[[Staged, Slot], bool],
    newest_first: bool,
    old: bool,
) -> tuple[Staged, Slot] | None:
    """What to make durable now. Pure.

    Args:
        snapshots: complete ones, newest first.
        done: whether a snapshot needs nothing: it is durable already, or need not be.
        newest_first: a restart or the end is near, everything counts and the newest most.
        old: nothing durable is young enough, so a snapshot nobody asked for is wanted too.
    """
    waiting = [entry for entry in snapshots if not done(*entry)]
    newest = waiting[0] if waiting and waiting[0] == snapshots[0] else None
    if newest_first and newest is not None:
        return newest
    asked_for = [entry for entry in waiting if entry[0].scheduled]
    if asked_for:
        return asked_for[-1]
    return newest if old else None


class Drains:
    """See the module. One a run.

    Args:
        staging: the run's slots.
        write: writes a journal event.
        warn: says and journals one sentence.
        preloaded: the drainer is forked from the warm interpreter.
    """

    def __init__(
        self,
        staging: Staging,
        *,
        write: Journal,
        warn: Callable[[str], None],
        preloaded: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging = staging
        self._write = write
        self._warn = warn
        self._preloaded = preloaded
        self._clock = clock
        self._process: Any = None
        self._connection: Connection | None = None
        self._request: Request | None = None
        self._staged: Staged | None = None
        self._heard_at = 0.0
        self._look_at = 0.0
        self._not_before = 0.0
        self._durable_at = clock()
        self._trouble: Cause | None = None
        self._restored: Staged | None = None
        self._broken: dict[int, Staged] = {}
        self._published_at: dict[int, tuple[int, float]] = {}
        staging.set_trouble(None)  # an earlier supervisor's

    @property
    def busy(self) -> bool:
        """A request is under way."""
        return self._request is not None

    def look(self) -> None:
        """Hear what the drainer says, and give it what is due. Returns at once."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        self._hear(0.0)
        if self.busy:
            if now - self._heard_at > STALL_SECONDS:
                self._report(
                    f"writing {self._name()} has not moved for {STALL_SECONDS:.0f} s: training goes on from snapshots"
                    " in memory",
                    Cause.checkpoint_stall,
                )
            return
        if now < self._not_before:
            return
        old = now - self._durable_at >= DURABLE_SECONDS
        due = next_to_drain(self.staging.snapshots(), done=self._done, newest_first=False, old=old)
        if due is not None:
            self._ask(*due)

    def settle(self, *, restore: bool) -> None:
        """Make the newest snapshot durable, and the rest; no rank is writing one.

        However long it takes, as long as bytes move; a disk that hangs or is full is given up on.

        Args:
            restore: a rank is to resume. What the disk does not take is made loadable in memory, and the newest is
                all that is waited for: the rest is for `look`, while training goes on.
        """
        for _ in range(2 * len(self.staging.slots)):
            due = self._due_to_resume() if restore else self._due_at_the_end()
            if self.busy and not (restore and due is None):
                self._finish()
                continue  # it may have been the one
            if due is None:
                return
            self._ask(*due)
            failed = self._finish()
            if failed is not None and not failed.broken:  # else the next one may be whole
                if restore:
                    self._into_memory(*due)
                return

    def note_published(self, call: int, step: int, *, taken_at: float | None = None) -> None:
        """A durable checkpoint is there that no drainer wrote: snapshots of ours up to it need not be.

        Args:
            call: the ordinal of its `train()` call.
            step: its step.
            taken_at: when its state was that of the run, in seconds since the epoch; now when not given. What was
                taken later is no older, whatever its step is: a run may go back.
        """
        taken_at = time.time() if taken_at is None else taken_at
        self._durable_at = self._clock()
        known = self._published_at.get(call)
        if known is None or taken_at >= known[1]:
            self._published_at[call] = step, taken_at

    def close(self) -> None:
        """Let the drainer go, and the memory when everything that counts is durable."""
        self._end_process()
        if self._due_at_the_end() is None:
            self.staging.clear()
        else:
            self._warn(f"what could not be written to disk is kept in memory, in {self.staging.path}")

    # inside

    def _done(self, staged: Staged, slot: Slot) -> bool:
        """Durable, or nothing that could ever be, or a snapshot of ours when a newer checkpoint is durable."""
        return slot.drained or self._is_broken(staged, slot) or self._is_superseded(staged)

    def _is_broken(self, staged: Staged, slot: Slot) -> bool:
        return self._broken.get(slot.index) == staged

    def _is_superseded(self, staged: Staged) -> bool:
        if staged.scheduled:
            return False
        step, taken_at = self._published_at.get(staged.train_call.ordinal, (-1, 0.0))
        return staged.step <= step and staged.staged_at <= taken_at

    def _is_restored(self, staged: Staged) -> bool:
        """In memory already: not by its name alone, an earlier attempt's, or call's, may be the same."""
        return staged == self._restored and (self.staging.restore / staged.folder / MANIFEST).is_file()

    def _due_to_resume(self) -> tuple[Staged, Slot] | None:
        """The newest whole one, when nothing could resume from it yet."""
        for staged, slot in self.staging.snapshots():
            if not self._is_broken(staged, slot):
                return None if self._done(staged, slot) or self._is_restored(staged) else (staged, slot)
        return None

    def _due_at_the_end(self) -> tuple[Staged, Slot] | None:
        return next_to_drain(self.staging.snapshots(), done=self._done, newest_first=True, old=False)

    def _into_memory(self, staged: Staged, slot: Slot) -> None:
        self._restored = None
        shutil.rmtree(self.staging.restore, ignore_errors=True)  # an older one; nobody is reading it now
        self._ask(staged, slot, Request(slot=slot.index, restore=str(self.staging.restore)))
        if self.busy and self._finish() is None:
            self._restored = staged

    def _finish(self) -> Failed | None:
        """Wait for the request under way, as long as it moves; the answer when it is a failure."""
        while self.busy:
            if self._clock() - self._heard_at > STALL_SECONDS:
                return self._lost(
                    f"writing {self._name()} has not moved for {STALL_SECONDS:.0f} s",
                    Cause.checkpoint_stall,
                )
            failed = self._hear(0.1)
            if failed is not None:
                return failed
        return None

    def _ask(self, staged: Staged, slot: Slot, request: Request | None = None) -> None:
        self._request = request or Request(slot=slot.index)
        self._staged = staged
        self._heard_at = self._clock()
        try:
            if self._process is None or not self._process.is_alive():
                self._end_process()  # what is left of it
                self._start_process()
            assert self._connection is not None
            self._connection.send(self._request)
        except (OSError, EOFError) as error:
            self._lost(f"{self._name()} could not be written, there is no process for it: {error}")

    def _hear(self, seconds: float) -> Failed | None:
        """Take what has been answered; waits up to `seconds` for something."""
        while self._request is not None:
            if self._connection is None:
                return self._lost(f"{self._name()} could not be written, there is no process for it")
            try:
                if not self._connection.poll(seconds):
                    return None
                answer: Answer = self._connection.recv()
            except (EOFError, OSError):
                return self._lost(f"{self._name()} could not be written, the process that was to died")
            self._heard_at = self._clock()
            if isinstance(answer, Progress):
                continue
            self._request = None
            if isinstance(answer, Failed):
                self._failed(answer)
                return answer
            self._published(answer)
        return None

    def _failed(self, answer: Failed) -> None:
        if answer.broken:
            self._broken[answer.slot] = self._asked
            self._warn_of(
                f"{self._name()} is lost, its copy in memory cannot be read: {answer.reason}",
                Cause.checkpoint_corrupt,
            )
            return
        self._not_before = self._clock() + RETRY_SECONDS
        if answer.step is not None:  # else a rank took the slot first: nothing is wrong with the disk
            why, cause = ("the disk is full: ", Cause.disk_full) if answer.full else ("", Cause.unknown)
            self._report(f"{self._name()} could not be written, {why}{answer.reason}", cause)

    def _published(self, answer: Published) -> None:
        if answer.durable:
            self.note_published(answer.train_call, answer.step, taken_at=self._asked.staged_at)
            if self._trouble is not None:
                self._trouble = None
                self.staging.set_trouble(None)
                self._warn(f"checkpoints are written to disk again: {answer.path}")
        self._write(
            "checkpoint_published",
            step=answer.step,
            path=answer.path,
            verified=True,
            train_call=answer.train_call,
            scheduled=answer.scheduled,
            durable=answer.durable,
            size_bytes=answer.size_bytes,
            seconds=answer.seconds,
            removed=list(answer.removed),
        )

    def _lost(self, sentence: str, cause: Cause = Cause.unknown) -> Failed:
        """The request under way is given up, and the process with it."""
        assert self._request is not None
        self._end_process()
        failed = Failed(slot=self._request.slot, step=None, reason=sentence, full=False)
        self._request = None
        self._not_before = self._clock() + RETRY_SECONDS
        self._report(sentence, cause)
        return failed

    def _report(self, sentence: str, cause: Cause) -> None:
        """An alert, once until there is no trouble any more, or another."""
        if cause is self._trouble:
            return
        self._trouble = cause
        self.staging.set_trouble(sentence)
        self._warn_of(sentence, cause)

    def _warn_of(self, sentence: str, cause: Cause) -> None:
        self._write("checkpoint_failed", step=self._asked.step, cause=str(cause), reason=sentence)
        self._warn(sentence)

    @property
    def _asked(self) -> Staged:
        """What the latest request is about; nothing is reported before the first."""
        assert self._staged is not None
        return self._staged

    def _name(self) -> str:
        return f"{self._asked.output_dir}/{self._asked.folder}"

    def _start_process(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._preloaded else "spawn")
        self._connection, theirs = context.Pipe()
        parent = upstream.forkserver_pid() if self._preloaded else os.getpid()
        with theirs, upstream.hidden_main():
            process = context.Process(
                target=serve, args=(str(self.staging.path), theirs, parent), daemon=True
            )
            process.start()
        self._process = process  # one that was never started cannot be joined

    def _end_process(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.join(0.0 if self._trouble is Cause.checkpoint_stall else CLOSE_SECONDS)
            if self._process.is_alive():
                self._process.kill()  # what it was writing stays a partial directory, and is cleaned up later
                upstream.forget_child(self._process)  # a disk that hangs may hold it even now
            self._process = None
