"""Slots in memory: what they hold, which one is next, who may write it, and what is freed."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from support.slots import fill, held, snapshot
from support.transcripts import Story, stories

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import STAGED, StagedSnapshot, StagingSlot
from grpo_run.watchdog.causes import Cause

OUT = Path("/out")


class SlotShell:
    """Three empty slots."""

    def __init__(self, folder: Path) -> None:
        self.staging = StagingArea(folder)
        self.locks: list[ExitStack] = []

    def take(self, slot: str, step: str, *words: str, **fields: str) -> None:
        """A rank writes a snapshot: `own` of the run, or of the script."""
        changes: dict[str, Any] = {name: int(value) for name, value in fields.items()}
        fill(self._slot(slot), snapshot(OUT, int(step), scheduled="own" not in words, **changes))

    def begin(self, slot: str) -> None:
        """A rank begins to write the next snapshot."""
        self._slot(slot).begin_snapshot()

    def mark(self, slot: str, word: str) -> None:
        """A snapshot is `drained` to disk, or was `loaded` by ranks."""
        getattr(self._slot(slot), f"mark_{word}")()

    def holds(self) -> str:
        """The snapshots, the newest first, and the slots that are drained or use memory."""
        newest = [f"{staged.step} in {slot.index}" for staged, slot in self.staging.snapshots()]
        drained = [str(slot.index) for slot in self.staging.slots if slot.drained]
        used = [str(slot.index) for slot in self.staging.slots if uses_memory(slot)]
        lists = f"drained {' '.join(drained) or '-'}; memory {' '.join(used) or '-'}"
        return f"{', '.join(newest) or 'nothing'}; {lists}"

    def choose(self, sacrifice: str = "") -> str:
        """The slot for the next snapshot."""
        slot = self.staging.choose_slot(sacrifice=bool(sacrifice))
        return "none" if slot is None else str(slot.index)

    def free(self, keep_newest: str = "") -> str:
        """Free the memory of what is on disk or superseded."""

        def done(staged: StagedSnapshot, slot: StagingSlot) -> bool:
            return slot.drained

        return "some" if self.staging.free_unneeded(done, keep_newest=bool(keep_newest)) else "none"

    def other(self, slot: str) -> None:
        """Another process locks a slot."""
        self._enter(held(self._slot(slot)))

    def lock(self, slot: str, shared: str = "") -> bool:
        """Whether this process gets the lock of a slot, to write or to read it."""
        return bool(self._enter(self._slot(slot).locked(shared=bool(shared))))

    def unlock(self) -> None:
        """The last lock is released."""
        self.locks.pop().close()

    def busy(self) -> str:
        """Slots that are locked."""
        return " ".join(str(slot.index) for slot in self.staging.slots if slot.busy) or "none"

    def record(self, slot: str, content: str, cut: str = "", **fields: str) -> None:
        """Write the record of a snapshot: a text, `deep` JSON, or a `valid` one with changes, or cut."""
        if content == "valid":
            raw = json.loads(snapshot(OUT).model_dump_json())
            raw |= {name: json.loads(value) for name, value in fields.items()}
            content = json.dumps(raw)
        data = content.replace("deep", "[" * 100_000).encode("latin-1")
        (self._slot(slot).path / STAGED).write_bytes(data[: len(data) - int(cut or 0)])

    def read(self, slot: str) -> str:
        """The step of what a slot holds, or what is wrong."""
        try:
            staged = self._slot(slot).read_snapshot()
        except CheckpointError as error:
            return self._here(str(error))
        return f"step {staged.step}" if staged is not None else "nothing"

    def damage(self, slot: str, file: str = "", size: str = "") -> None:
        """Cut a file of a snapshot, remove it, or remove all."""
        path = self._slot(slot).files / file
        if size:
            os.truncate(path, int(size))
        else:
            path.unlink() if file else shutil.rmtree(path)

    def check(self, slot: str) -> str:
        """Whether a snapshot is complete."""
        staged = self._slot(slot).read_snapshot()
        assert staged is not None
        try:
            self._slot(slot).check_complete(staged)
        except CheckpointError as error:
            return self._here(str(error))
        return "complete"

    def spare(self, slot: str) -> str:
        """Files that the next snapshot is written over."""
        folder = self._slot(slot).spare
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return " ".join(names) or "none"

    def trouble(self, cause: str = "") -> str:
        """Set what is wrong with the disk; answers what another process sees, and the file."""
        self.staging.set_trouble(Cause[cause] if cause else None, "the disk is full")
        seen = StagingArea(self.staging.path).trouble
        file = self.staging.path / "TROUBLE.json"
        return f"{seen.name if seen else 'none'} {file.read_text() if file.exists() else ''}"

    def clear(self) -> bool:
        """Free all memory; answers whether the area is gone."""
        self.staging.clear()
        return not self.staging.path.exists()

    def _enter(self, lock: AbstractContextManager[Any]) -> Any:
        self.locks.append(ExitStack())
        return self.locks[-1].enter_context(lock)

    def _slot(self, index: str) -> StagingSlot:
        return self.staging.slots[int(index)]

    def _here(self, text: str) -> str:
        return re.sub(r"column \d+", "column N", text.replace(str(self.staging.path), "MEMORY"))


def uses_memory(slot: StagingSlot) -> bool:
    """Whether there is memory behind a slot's files."""
    return any(path.stat().st_blocks for path in slot.path.rglob("*.pt"))


@stories(__file__, "slots.txt")
def test_slots(story: Story, word: str, tmp_path: Path) -> None:
    """Every story of the file."""
    story.check(SlotShell(tmp_path / "memory"), word)
