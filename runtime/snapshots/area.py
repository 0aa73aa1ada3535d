"""The staging area: three slots on a memory-backed file system for one run's newest snapshots.

    <memory>/grpo-run-<uid>/9f86d081884c7d65/            mode 0700; a random name that run.json holds
      slot0/ slot1/ slot2/
        lock                   held while the slot is written, drained or loaded; the kernel releases it
                               if the holder dies
        STAGED.json            written last, by rename; without it the slot holds no complete snapshot
        PARTS.json             which parts of a snapshot of several hosts are here
        DRAINED                the snapshot is on disk as a checkpoint
        LOADED                 ranks have resumed from it
        files/checkpoint-N/    the checkpoint, as the trainer wrote it
        spare/                 files of an earlier snapshot, over which the next one is written
      OWNER.json lock          whose area it is, and the lock of the run's supervisor (`ownership`)
      TROUBLE.json             present while checkpoints cannot be written to disk

Snapshots survive the death of every process, but not a reboot. There are three slots so that one can be
drained, one can hold the newest snapshot and one can be written at any time. Ranks write
(`runtime.rank.saving`), the drain worker reads. Does not write checkpoints. Of a run over several hosts each
has an area of its own, with its part of a snapshot and those that others have sent (`parts.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import write_json
from grpo_run.runtime.snapshots.parts import read_parts
from grpo_run.runtime.snapshots.slot import PARTS, STAGED, StagedSnapshot, StagingSlot
from grpo_run.watchdog.causes import Cause

SLOTS = 3
TROUBLE = "TROUBLE.json"


class StagingArea:
    """The staging slots of one run on this node.

    Args:
        path: the run's directory in memory; created if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cache: dict[int, tuple[tuple[int, int], StagedSnapshot]] = {}
        self.slots = tuple(StagingSlot(index, path / f"slot{index}") for index in range(SLOTS))
        self._create()

    def _create(self) -> None:
        for folder in (self.path, *(slot.path for slot in self.slots)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def snapshots(self) -> list[tuple[StagedSnapshot, StagingSlot]]:
        """Return the complete snapshots, newest first. Unreadable ones are skipped."""
        found = []
        for slot in self.slots:
            staged = self._read(slot)
            if staged is not None:
                found.append((staged, slot))
        return sorted(found, key=lambda entry: entry[0].order, reverse=True)

    def _read(self, slot: StagingSlot) -> StagedSnapshot | None:
        """Return the snapshot in a slot; parse its file only if it changed."""
        try:
            status = os.stat(slot.path / STAGED)
            version = (status.st_mtime_ns, status.st_ino)
            cached = self._cache.get(slot.index)
            if cached is None or cached[0] != version:
                staged = slot.read_snapshot()
                if staged is None:
                    return None
                cached = self._cache[slot.index] = version, staged
        except (OSError, CheckpointError):
            return None  # an unreadable slot counts as empty and is written again
        return cached[1]

    @property
    def has_parts(self) -> bool:
        """Whether a slot has a snapshot, or a part of one."""
        return any((slot.path / name).exists() for slot in self.slots for name in (STAGED, PARTS))

    @property
    def trouble(self) -> Cause | None:
        """Why checkpoints cannot be written to disk at present; nothing should wait for it then."""
        try:
            return Cause(json.loads((self.path / TROUBLE).read_text())["cause"])
        except FileNotFoundError:
            return None

    def set_trouble(self, cause: Cause | None, sentence: str = "") -> None:
        """Record why checkpoints cannot be written to disk, or with None that they can be written again."""
        if cause is None:
            (self.path / TROUBLE).unlink(missing_ok=True)
            return
        with suppress(OSError):  # memory may be full too; ranks then wait for the disk until their deadline
            write_json(self.path / TROUBLE, {"cause": cause, "sentence": sentence})

    def choose_slot(self, *, sacrifice: bool = False, copying: Collection[int] = ()) -> StagingSlot | None:
        """Return the slot to write next, or None if every slot is needed or locked.

        Prefers a drained slot, whose memory is allocated already, then one whose snapshot a newer one
        supersedes, then an empty one. Never returns the newest snapshot, or a scheduled one that is not on
        disk.

        Args:
            sacrifice: allow scheduled snapshots that are not on disk, oldest first; not those that the user
                asked for.
            copying: indices of slots that are needed because they are being copied to another host.
        """
        snapshots = self.snapshots()
        complete = {slot.index for _, slot in snapshots}
        drained = [slot for _, slot in snapshots if slot.drained]
        superseded = [
            slot for staged, slot in snapshots[1:] if not slot.drained and not staged.must_reach_disk
        ]
        empty = [slot for slot in self.slots if slot.index not in complete]
        older = [slot for staged, slot in reversed(snapshots[1:]) if not staged.kept] if sacrifice else []
        usable = (slot for slot in (*drained, *superseded, *empty, *older) if slot.index not in copying)
        return next((slot for slot in usable if not slot.busy), None)

    def free_unneeded(
        self, done: Callable[[StagedSnapshot, StagingSlot], bool], *, keep_newest: bool = False
    ) -> int:
        """Free the memory of every slot whose snapshot nobody needs; return how many bytes that were.

        A slot that is being written, drained or loaded is left alone, and so are the newest two of those
        that have parts only.

        Args:
            done: returns True for a snapshot that is on disk or need not be.
            keep_newest: keep the newest snapshot even so: ranks may be about to load it.
        """
        snapshots = {slot.index: staged for staged, slot in self.snapshots()}
        newest = next(iter(snapshots), None)
        freed = 0
        parts = {slot.index: found for slot in self.slots if (found := read_parts(slot)) is not None}
        needed = sorted(parts.keys() - snapshots.keys(), key=lambda index: parts[index].staged.order)[-2:]
        for slot in self.slots:
            if slot.index in needed:
                continue
            staged = snapshots.get(slot.index)
            is_newest = slot.index == newest
            if staged is not None and not done(staged, slot) and (is_newest or staged.must_reach_disk):
                continue
            if is_newest and keep_newest:
                continue
            with suppress(OSError, CheckpointError), slot.locked() as acquired:
                if acquired and slot.read_snapshot() == staged:  # else a rank has completed another one since
                    freed += slot.free()
        return freed

    def clear(self) -> None:
        """Delete the area and free its memory."""
        shutil.rmtree(self.path, ignore_errors=True)
