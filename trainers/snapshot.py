"""A rank's side of checkpoints in memory: one copy at memory speed, then training goes on.

The trainer's own checkpoint method runs as ever, only that its directory is a slot of the run's staging (`runtime.staging`)
and that what torch and safetensors would write there is copied into this rank's arena (`interception.py`). All
ranks take part, agree on the slot, and rank 0 declares it complete. Writing it to disk is the supervisor's. Called
by `saving.py`; does not decide when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime import arena as memory
from grpo_run.runtime.arena import Arena
from grpo_run.runtime.errors import CheckpointError, NoRoomError
from grpo_run.runtime.staging import Slot, Staged, Staging
from grpo_run.trainers import upstream
from grpo_run.trainers.interception import captured
from grpo_run.trainers.session import Session

WAIT_SECONDS = 1800.0
"""For the disk to take an earlier checkpoint that the script asked for, while it does take it."""
POLL_SECONDS = 0.01
WORTH_PREPARING_BYTES = 64 << 20
"""Less is taken in some tens of milliseconds when it is needed."""
TAKEN, NO_ROOM, NO_SLOT = 0, 1, 2


class Snapshots:
    """The slots as one rank uses them; its arenas stay mapped from one snapshot to the next.

    Args:
        staging: the run's.
    """

    def __init__(self, session: Session, staging: Staging) -> None:
        self._session = session
        self.staging = staging
        self._arenas: dict[int, Arena] = {}
        self._preparing: threading.Thread | None = None
        self.cost_seconds = 0.0
        """How long the last one blocked this rank."""
        self.last: tuple[Slot, Staged] | None = None
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
                arena = self._arenas[slot.index] = Arena(slot.arena(self._session.rank))
                arena.reserve(size_bytes)
            except (NoRoomError, CheckpointError, OSError):
                return  # the first snapshot finds the same, and says so

    def take(self, trainer: Any, staged: Staged, write: Callable[[Path], Any]) -> int:
        """Take one. Collective.

        Args:
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
            if self._on_main(lambda: _empty(slot, folder)) != TAKEN:
                return NO_ROOM
            outcome = NO_ROOM
            try:
                arena = self._arena(slot)
                arena.begin()
                with captured(arena, folder) as image, _redirected(trainer, slot.files):
                    write(folder)
                slot.image(session.rank).write_bytes(image.to_json())
                outcome = TAKEN
            except (NoRoomError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in memory.NO_ROOM:
                    raise
                # what is not caught is written to the slot itself, which may be as full
                session.journal.write("warning", rank=session.rank, text=str(error))
            outcome = int(session.votes.maximum(outcome))
            if outcome == TAKEN:
                outcome = self._on_main(lambda: slot.complete(staged))
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
                self._session.journal.write("warning", rank=0, text=f"no snapshot: {error}")
        return int(self._session.votes.maximum(outcome))

    def wait_durable(self, seconds: float = WAIT_SECONDS) -> bool:
        """Wait until the last one is on disk. Collective; False when it was not within `seconds`, or there is trouble."""
        done = 0
        if self._session.is_main:
            assert self.last is not None
            slot, staged = self.last
            deadline = time.monotonic() + seconds
            while not done and time.monotonic() < deadline and not self.staging.troubled:
                # a slot that was given to another since was drained before
                done = int(slot.drained or slot.staged() != staged)
                self._session.slot.count()
                time.sleep(POLL_SECONDS)
        return bool(self._session.votes.maximum(done))

    def close(self) -> None:
        """Unmap; the memory stays, it is the run's."""
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _agree_on_slot(self, held: ExitStack, *, wait: bool) -> Slot | None:
        """Rank 0 chooses and locks one, for all."""
        index = -1
        if self._session.is_main:
            deadline = time.monotonic() + (WAIT_SECONDS if wait else 0.0)
            while index < 0:
                # the disk takes none: the state now is worth more than an older one, whoever asked for that
                slot = self.staging.choose(sacrifice=self.staging.troubled)
                if slot is not None and held.enter_context(slot.locked()):
                    index = slot.index
                elif time.monotonic() >= deadline:
                    break
                else:
                    self._session.slot.count()
                    time.sleep(POLL_SECONDS)
        index = self._session.votes.maximum(index)
        return self.staging.slots[index] if index >= 0 else None

    def _arena(self, slot: Slot) -> Arena:
        if self._preparing is not None:
            self._preparing.join()
        if slot.index not in self._arenas:
            try:
                self._arenas[slot.index] = Arena(slot.arena(self._session.rank))
            except CheckpointError as error:
                raise NoRoomError(str(error)) from error
        return self._arenas[slot.index]


def _empty(slot: Slot, folder: Path) -> None:
    slot.withdraw()
    folder.mkdir(parents=True)


@contextmanager
def _redirected(trainer: Any, folder: Path) -> Iterator[None]:
    """Let the trainer take `folder` for its output directory while it saves."""
    own = {name: value for name, value in trainer.__dict__.items() if name == upstream.OUTPUT_DIR}
    setattr(trainer, upstream.OUTPUT_DIR, lambda trial=None: str(folder))
    try:
        yield
    finally:
        trainer.__dict__.pop(upstream.OUTPUT_DIR, None)
        trainer.__dict__.update(own)


def finite(trainer: Any) -> bool:
    """Whether every weight of this rank's part of the model is a number; one pass over them.

    A loss that is no number is logged as 0.0 (`logging_nan_inf_filter`), so the weights themselves are asked.
    """
    parts = [
        part
        for parameter in trainer.model.parameters()
        if (part := upstream.local_part(parameter)).numel() and part.is_floating_point()
    ]
    by_device: dict[Any, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault((part.device, part.dtype), []).append(part)
    with torch.no_grad():
        # the largest absolute value cannot overflow, and no number in, no number out
        return all(
            bool(torch.nn.utils.get_total_norm(group, norm_type=float("inf")).isfinite())
            for group in by_device.values()
        )
