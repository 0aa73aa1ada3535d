"""Snapshots in memory: three slots on a memory-backed file system, of which the newest complete one outlives every process.

    <memory>/grpo-run-<uid>/<run-id>-<digest>/            mode 0700
      slot0/ slot1/ slot2/
        lock                   held by who writes the slot or drains it; the kernel lets go when that process dies
        STAGED.json            written last, by rename: no STAGED.json, no snapshot
        DRAINED                the same content is in a durable checkpoint
        rank0.arena rank0.json big tensors of rank 0, and what they are (`buffer.py`, `index.py`)
        files/                 everything else of the checkpoint, as the trainer wrote it
      RUN.json                 which supervisor of which run directory it is of
      TROUBLE.json             the disk does not take checkpoints
      restore/                 a checkpoint made here when there is no room for it on disk

Three, so that one may be drained, one be the newest, and one be written, whatever dies when. Ranks write
(`trainers.saving.saver`), the supervisor's drainer reads. Does not copy tensors and writes no durable checkpoint. One node only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from grpo_run.runtime.checkpoints.manifest import Identity
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import write_json

SLOTS = 3
STAGED = "STAGED.json"
DRAINED = "DRAINED"
TROUBLE = "TROUBLE.json"
OWNER = "RUN.json"
RESTORE = "restore"
SCHEMA = 1
MEMORY_ROOT = Path("/dev/shm")
LOCK_POLL_SECONDS = 0.005


class Staged(Identity):
    """The contents of `STAGED.json`: what the checkpoint is, and what becomes of it on disk.

    One that is not `scheduled` is made durable when it is needed. `limit` is the script's `save_total_limit`, `best`
    the directory name of its best checkpoint so far, `staged_at` the wall time in seconds.
    """

    schema_version: int = SCHEMA
    attempt: int
    output_dir: str
    limit: int | None = None
    best: str | None = None
    staged_at: float

    @property
    def order(self) -> tuple[int, int, int, float]:
        """Newer is greater: a later attempt may stage an earlier step, or an earlier call, again."""
        return (self.attempt, self.train_call.ordinal, self.step, self.staged_at)


@dataclass(frozen=True)
class Slot:
    """One place for a snapshot."""

    index: int
    path: Path

    @property
    def files(self) -> Path:
        """Where the trainer writes, as if it were its `output_dir`."""
        return self.path / "files"

    def arena(self, rank: int) -> Path:
        """The file of a rank's tensors."""
        return self.path / f"rank{rank}.arena"

    def image(self, rank: int) -> Path:
        """What a rank's arena holds."""
        return self.path / f"rank{rank}.json"

    def staged(self) -> Staged | None:
        """What is complete here; None for nothing.

        Raises:
            CheckpointError: there is something, and it is not one of ours.
        """
        try:
            raw = (self.path / STAGED).read_bytes()
        except OSError:
            return None
        try:
            staged = Staged.model_validate_json(raw)
        except pydantic.ValidationError as error:
            raise CheckpointError(f"{self.path / STAGED}: {error.errors()[0]['msg']}") from error
        if staged.schema_version != SCHEMA:
            raise CheckpointError(f"{self.path / STAGED} has schema {staged.schema_version}, not {SCHEMA}")
        return staged

    @property
    def drained(self) -> bool:
        """What is here is on disk too."""
        return (self.path / DRAINED).exists()

    def mark_drained(self) -> None:
        """Say so; the caller holds the lock."""
        (self.path / DRAINED).touch(0o600)

    def withdraw(self) -> None:
        """Begin to write: what was here is no snapshot any more. The caller holds the lock."""
        (self.path / STAGED).unlink(missing_ok=True)
        (self.path / DRAINED).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir(mode=0o700)

    def complete(self, staged: Staged) -> None:
        """All ranks have written: from here on it counts."""
        write_json(self.path / STAGED, staged.model_dump())

    @contextmanager
    def locked(self, wait_seconds: float = 0.0) -> Iterator[bool]:
        """Hold the slot; gives False when somebody else still does after `wait_seconds`."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        mine = False
        try:
            mine = _lock(descriptor, time.monotonic() + wait_seconds)
            yield mine
        finally:
            if mine:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the descriptor too
            os.close(descriptor)

    @property
    def busy(self) -> bool:
        """Somebody writes or drains it now."""
        with self.locked() as free:
            return not free

    def size_bytes(self) -> int:
        """Memory held."""
        return sum(file.stat().st_blocks * 512 for file in self.path.rglob("*") if file.is_file())


def _lock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_SECONDS)
        else:
            return True


class Staging:
    """The slots of one run on this node.

    Args:
        path: the run's directory in memory; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readings: dict[int, tuple[tuple[int, int], Staged]] = {}
        self.slots = tuple(Slot(index, path / f"slot{index}") for index in range(SLOTS))
        self._make()

    def _make(self) -> None:
        for folder in (self.path, *(slot.path for slot in self.slots)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def restore(self) -> Path:
        """Stands in for an `output_dir` that is full."""
        return self.path / RESTORE

    def snapshots(self) -> list[tuple[Staged, Slot]]:
        """What is complete, newest first; what cannot be read is none."""
        found = []
        for slot in self.slots:
            staged = self._read(slot)
            if staged is not None:
                found.append((staged, slot))
        return sorted(found, key=lambda entry: entry[0].order, reverse=True)

    def _read(self, slot: Slot) -> Staged | None:
        """What is complete in a slot, read anew when the file is another."""
        try:
            status = os.stat(slot.path / STAGED)
            mark = (status.st_mtime_ns, status.st_ino)
            last = self._readings.get(slot.index)
            if last is None or last[0] != mark:
                staged = slot.staged()
                if staged is None:
                    return None
                last = self._readings[slot.index] = mark, staged
        except (OSError, CheckpointError):
            return None  # a slot that nothing can be made of is there to be written again
        return last[1]

    @property
    def troubled(self) -> bool:
        """The disk does not take checkpoints: nobody is to wait for it."""
        return (self.path / TROUBLE).exists()

    def set_trouble(self, sentence: str | None) -> None:
        """Say that the disk does not take checkpoints, or does again."""
        if sentence is None:
            (self.path / TROUBLE).unlink(missing_ok=True)
            return
        with suppress(
            OSError
        ):  # memory is full or gone as well: ranks then wait for the disk, and come to their deadline
            write_json(self.path / TROUBLE, {"sentence": sentence})

    def choose(self, *, sacrifice: bool = False) -> Slot | None:
        """The slot to write next, None when every one is needed or in use: wait, or do without.

        A drained one first, as its memory is there already; then a snapshot that a newer one has superseded; then an empty
        one. Never the newest that is not on disk, nor one that the script asked for and that is not there yet.

        Args:
            sacrifice: the latter may go after all, the oldest first.
        """
        snapshots = self.snapshots()
        complete = {slot.index for _, slot in snapshots}
        drained = [slot for _, slot in snapshots if slot.drained]
        superseded = [slot for staged, slot in snapshots[1:] if not slot.drained and not staged.scheduled]
        empty = [slot for slot in self.slots if slot.index not in complete]
        old = [slot for _, slot in reversed(snapshots[1:])] if sacrifice else []
        return next((slot for slot in (*drained, *superseded, *empty, *old) if not slot.busy), None)

    def claim(self, supervisors: int, run_directory: Path) -> None:
        """Take the place over for the run's next supervisor; what the last one did not leave here is not the run's.

        Memory may be of a run that was deleted and begun again, or older than what the run did on another machine since.
        Places of runs whose directories are gone are given back.

        Args:
            supervisors: how many the run's journal knows before this one.
            run_directory: the run's.
        """
        if not self.is_of(supervisors):
            self.clear()
            self._make()
        write_json(
            self.path / OWNER, {"supervisors": supervisors + 1, "run_directory": str(run_directory.resolve())}
        )
        for other in self.path.parent.iterdir():
            directory = _owner(other).get("run_directory")
            if not isinstance(directory, str):
                continue
            gone = Path(directory)
            if gone.parent.exists() and not gone.exists():  # else a disk may be missing, not the run
                shutil.rmtree(other, ignore_errors=True)

    def is_of(self, supervisors: int) -> bool:
        """Whether the run's newest supervisor, its journal's `supervisors`-th, had its snapshots here."""
        return _owner(self.path).get("supervisors") == supervisors

    def clear(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.path, ignore_errors=True)

    def size_bytes(self) -> int:
        """Memory held by all slots."""
        return sum(slot.size_bytes() for slot in self.slots)


def _owner(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / OWNER).read_bytes())
    except (OSError, ValueError):
        return {}  # being made, or nobody's
    return found if isinstance(found, dict) else {}


def place(run_directory: Path, run_id: str, root: Path = MEMORY_ROOT) -> Path | None:
    """Where a run's snapshots go, None on a machine without a memory-backed file system.

    Args:
        run_directory: tells runs of one name apart.
        root: where one is mounted.
    """
    mine = root / f"grpo-run-{os.getuid()}"
    try:
        mine.mkdir(exist_ok=True, mode=0o700)
        found = mine.lstat()
    except OSError:
        return None
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        return None  # anybody may make a file here: what somebody else made first is not to be trusted
    digest = hashlib.sha256(os.fsencode(run_directory.resolve())).hexdigest()[:12]
    return mine / f"{run_id[:48]}-{digest}"
