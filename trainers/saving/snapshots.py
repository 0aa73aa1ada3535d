"""A rank's side of checkpoints in memory: one copy at memory speed, then training goes on.

The trainer's own checkpoint method runs as ever, only that its directory is a slot of the run's staging (`runtime.staging.slots`)
and that what torch and safetensors would write there is copied into this rank's arena (`interception.py`). All
ranks take part, agree on the slot, and rank 0 declares it complete. Writing it to disk is the supervisor's. Called
by `saver.py`; does not decide when.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError, NoHeadroomError
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.buffer import SnapshotBuffer
from grpo_run.runtime.staging.headroom import is_full, least_headroom
from grpo_run.runtime.staging.slot import StagedSnapshot, StagingSlot
from grpo_run.trainers import upstream
from grpo_run.trainers.capture.copying import copy_threads
from grpo_run.trainers.capture.interception import capture_saves
from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.rank.session import Session

WAIT_SECONDS = 1800.0
"""For the disk to take an earlier checkpoint that the script asked for, while it does take it."""
SLICE_SECONDS = 30.0
"""Rank 0 tells the others this often that it still waits: a vote has a deadline of its own."""
POLL_SECONDS = 0.01
GAVE_UP, WAITING, FOUND = 0, 1, 2
WORTH_PREPARING_BYTES = 64 << 20
"""Less is taken in some tens of milliseconds when it is needed."""
TAKEN, NO_ROOM, NO_SLOT = 0, 1, 2


class Snapshots:
    """The slots as one rank uses them; its arenas stay mapped from one snapshot to the next.

    Args:
        staging: the run's.
    """

    def __init__(self, session: Session, staging: StagingArea) -> None:
        self._session = session
        self.staging = staging
        self._arenas: dict[int, SnapshotBuffer] = {}
        self._preparing: threading.Thread | None = None
        self._threads = copy_threads(session.local_world_size)
        self._warned_of_memory = False
        self.cost_seconds = 0.0
        """How long the last one blocked this rank."""
        self.last: tuple[StagingSlot, StagedSnapshot] | None = None
        """On rank 0, the last one taken."""

    def prepare(self, size_bytes: int) -> None:
        """Take this rank's memory for two slots from the kernel in the background, a second a gigabyte; not collective.

        Args:
            size_bytes: about what this rank will put into a checkpoint.
        """
        if size_bytes >= WORTH_PREPARING_BYTES and self._preparing is None:
            self._preparing = threading.Thread(
                target=self._prepare, args=(size_bytes,), daemon=True, name="grpo-run-snapshots"
            )
            self._preparing.start()

    def _prepare(self, size_bytes: int) -> None:
        for slot in self.staging.slots[:2]:  # the newest stays while the next is written
            try:
                arena = self._arenas[slot.index] = SnapshotBuffer(slot.buffer_path(self._session.rank))
                arena.reserve(size_bytes)
            except (NoHeadroomError, CheckpointError, OSError):
                return  # the first snapshot finds the same, and says so

    def take(
        self, trainer: Any, staged: StagedSnapshot, write: Callable[[Path], Any], expected_bytes: int = 0
    ) -> int:
        """Take one. Collective.

        Args:
            expected_bytes: about what all ranks will write; without room for it nothing is begun, as a rank that gives
                up half-way leaves the others in a collective of the save.
            staged: what it will be; equal on every rank.
            write: writes this rank's part of the checkpoint; given its directory.

        Returns:
            `TAKEN`; `NO_ROOM`, when there was no memory for it on some rank; or `NO_SLOT`, when all are needed.
        """
        session = self._session
        with ExitStack() as held:
            slot = self._agree_on_slot(held, wait=staged.scheduled)
            if slot is None:
                return NO_SLOT
            began = time.perf_counter()
            folder = slot.files / staged.folder
            # nobody writes before the slot is empty
            if self._on_main(lambda: _empty(slot, folder, expected_bytes)) != TAKEN:
                return NO_ROOM
            outcome = NO_ROOM
            try:
                arena = self._arena(slot)
                arena.begin()
                elsewhere = {upstream.OUTPUT_DIR: lambda trial=None: str(slot.files)}
                with (
                    capture_saves(arena, folder, threads=self._threads) as image,
                    override_attributes(trainer, **elsewhere),
                ):
                    write(folder)
                slot.index_path(session.rank).write_bytes(image.to_json())
                outcome = TAKEN
            except (Exception, upstream.collective_save_error()) as error:
                if not _is_no_room(error, slot.path):
                    raise
                # what is not caught is written to the slot itself, which may be as full
                session.warn_in_journal(str(error))
            outcome = int(session.votes.maximum(outcome))
            if outcome == TAKEN:
                outcome = self._on_main(lambda: slot.complete_snapshot(staged))
            if outcome != TAKEN:
                self._on_main(slot.begin_snapshot)  # or a small file system would stay full
            if session.is_main and outcome == TAKEN:
                self.last = slot, staged
        self.cost_seconds = time.perf_counter() - began
        return outcome

    def _on_main(self, deed: Callable[[], None]) -> int:
        """Rank 0 does it, and all ranks know whether it could: somebody may have taken the directory away."""
        outcome = TAKEN
        if self._session.is_main:
            try:
                deed()
            except OSError as error:
                outcome = NO_ROOM
                self._session.warn_in_journal(f"no snapshot: {error}")
        return int(self._session.votes.maximum(outcome))

    def wait_durable(self, seconds: float = WAIT_SECONDS) -> bool:
        """Wait until the last one is on disk. Collective; False when it was not within `seconds`, or there is trouble."""

        def look() -> int:
            assert self.last is not None
            slot, staged = self.last
            # a slot that was given to another since was drained before
            if slot.drained or slot.read_snapshot() != staged:
                return FOUND
            return GAVE_UP if self.staging.troubled else WAITING

        return self._wait(look, seconds) == FOUND

    def warn_no_memory(self, step: int) -> None:
        """Warn, once per attempt, that a checkpoint did not fit into memory."""
        if not self._warned_of_memory:
            self._warned_of_memory = True
            self._session.warn(
                f"no memory for a snapshot at step {step}: the script's own checkpoints are written directly to disk,"
                " and a fault loses the steps since the last one. The journal names the limit; in a container it is"
                " often the size of /dev/shm (docker's --shm-size). --snapshot-dir selects another in-memory file"
                " system."
            )

    def close(self) -> None:
        """Unmap; the memory stays, it is the run's."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _agree_on_slot(self, held: ExitStack, *, wait: bool) -> StagingSlot | None:
        """Rank 0 chooses and locks one, for all."""

        def look() -> int:
            try:
                slot = self.staging.choose_slot(sacrifice=self.staging.troubled)
                if slot is not None and held.enter_context(slot.locked()):
                    return FOUND + slot.index
            except OSError as error:  # somebody took the directory away
                self._session.warn_in_journal(f"no snapshot: {error}")
                return GAVE_UP
            return WAITING

        found = self._wait(look, WAIT_SECONDS if wait else 0.0)
        return self.staging.slots[found - FOUND] if found >= FOUND else None

    def _wait(self, look: Callable[[], int], seconds: float) -> int:
        """Let rank 0 look until it finds something or `seconds` are over; all ranks get its answer. Collective."""
        deadline = time.monotonic() + seconds
        while True:
            answer = GAVE_UP
            if self._session.is_main:
                until = min(deadline, time.monotonic() + SLICE_SECONDS)
                while (answer := look()) == WAITING and time.monotonic() < until:
                    self._session.slot.record_work()
                    time.sleep(POLL_SECONDS)
                if answer == WAITING and time.monotonic() >= deadline:
                    answer = GAVE_UP
            answer = int(self._session.votes.maximum(answer))
            if answer != WAITING:
                return answer

    def _arena(self, slot: StagingSlot) -> SnapshotBuffer:
        if self._preparing is not None:
            self._preparing.join()
        if slot.index not in self._arenas:
            try:
                self._arenas[slot.index] = SnapshotBuffer(slot.buffer_path(self._session.rank))
            except CheckpointError as error:
                raise NoHeadroomError(str(error)) from error
        return self._arenas[slot.index]


def _empty(slot: StagingSlot, folder: Path, expected_bytes: int) -> None:
    slot.begin_snapshot()
    folder.mkdir(parents=True)
    room = least_headroom(slot.path)
    if expected_bytes > slot.size_bytes() + room.usable_bytes:
        raise OSError(errno.ENOSPC, f"about {expected_bytes >> 20} MiB are needed, and {room.sentence}")


def _is_no_room(error: BaseException, folder: Path) -> bool:
    causes = upstream.save_errors(error)
    return any(isinstance(cause, NoHeadroomError) or is_full(cause, folder) for cause in causes)


def finite(trainer: Any) -> bool:
    """Whether every weight of this rank's part of the model is a number; one pass over them.

    A loss that is no number is logged as 0.0 (`logging_nan_inf_filter`), so the weights themselves are asked.
    """
    parts = []
    for parameter in trainer.model.parameters():
        if not parameter.requires_grad:
            continue  # it is what it was when it was loaded
        part = upstream.local_part(parameter)
        if part.numel() and part.is_floating_point():
            parts.append(part.float() if part.element_size() == 1 else part)  # no norm is defined for 8 bits
    by_device: dict[Any, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault((part.device, part.dtype), []).append(part)
    with torch.no_grad():
        # the largest absolute value cannot overflow, and no number in, no number out
        return all(
            bool(torch.nn.utils.get_total_norm(group, norm_type=float("inf")).isfinite())
            for group in by_device.values()
        )
