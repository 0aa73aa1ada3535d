"""A trainer that writes small checkpoints, a clock for tests, and helpers that take snapshots."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from grpo_run.runtime.rank.saving._reservation import SaveFlags
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.slot import StagingSlot
from support.slots import snapshot

TAKEN, NO_MEMORY, NO_SLOT, FORBIDDEN = "taken", "no memory", "no slot", "forbidden"


class SnapshotTrainer:
    """A trainer that writes a checkpoint below its output directory."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.weights = torch.arange(1000.0)
        self.during: Callable[[], None] = lambda: None

    def write(self, folder: Path) -> None:
        """Write a model, optimizer state and trainer state."""
        safetensors.torch.save_file({"weight": self.weights}, folder / "model.safetensors")
        torch.save({"step": self.weights}, folder / "optimizer.pt")
        (folder / "trainer_state.json").write_text("{}")
        self.during()


class Time:
    """A replacement of the module `time` whose clock advances by `sleep`.

    `at` is a pair of seconds since the start and a function to call at that time.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0
        self.at: tuple[float, Callable[[], None]] | None = None
        self.monotonic = self.perf_counter = lambda: self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock."""
        self.now += seconds
        self.slept += 1
        if self.at is not None and self.now - 100.0 >= self.at[0]:
            (_, action), self.at = self.at, None
            action()


def take(
    snapshots: Snapshots,
    trainer: SnapshotTrainer,
    step: int = 5,
    flags: SaveFlags | None = None,
    **changes: Any,
) -> str:
    """Take a snapshot of a step and return the outcome."""
    staged = snapshot(trainer.output, step, **changes)
    with snapshots.reserve(staged, flags or SaveFlags(non_finite=False)) as reservation:
        if reservation.slot is not None:
            return TAKEN if snapshots.write(reservation, trainer.write) else NO_MEMORY
        if reservation.flags.forbid_snapshot:
            return FORBIDDEN
        return NO_MEMORY if reservation.lacks_memory else NO_SLOT


def steps(snapshots: Snapshots) -> list[int]:
    """Return the steps of the complete snapshots, newest first."""
    return [staged.step for staged, _ in snapshots.staging.snapshots()]


def busy(slot: StagingSlot) -> bool:
    """Whether another file descriptor holds the lock of the slot."""
    descriptor = os.open(slot.path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
