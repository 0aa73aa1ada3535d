"""Snapshots in a staging directory as ranks write them, with a few bytes in each file."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot
from support.identities import identity

PLAIN = {"trainer_state.json": b'{"global_step": 5}', "tokenizer/vocab.txt": b"a\nb\n"}
"""Files that the trainer writes directly."""


def snapshot(output: Path, step: int = 5, **changes: Any) -> StagedSnapshot:
    """Describe `checkpoint-<step>` in `output`: scheduled, of the first call and attempt."""
    call = {key: changes.pop(key) for key in ("ordinal", "trainer_class") if key in changes}
    what = identity(output, step, versions={"torch": "2.13.0"}, **call)
    fields = {"attempt": 0, "output_dir": str(output), "staged_at": 1000.0}
    return StagedSnapshot(**(dict(what) | fields | changes))


def weights(rank: int, step: int) -> bytes:
    """Return the bytes of a rank's weights."""
    return b"weights of rank %d at step %d " % (rank, step) * 50


def fill(slot: StagingSlot, staged: StagedSnapshot, *, recorded: bool = True) -> StagedSnapshot:
    """Write a snapshot: every rank's data, the trainer's files, then the completion marker.

    Args:
        recorded: with the sizes of its files, so that it can be loaded from memory.
    """
    slot.begin_snapshot()
    contents = dict(PLAIN)
    for rank in range(staged.world_size):
        contents[f"model-{rank}.safetensors"] = contents[f"optimizer/rank{rank}.pt"] = weights(
            rank, staged.step
        )
    for name, content in contents.items():
        path = slot.files / staged.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    slot.prepare_snapshot(staged)
    if recorded:
        staged = slot.record_files(staged)
    slot.complete_snapshot()
    return staged


@contextmanager
def held(slot: StagingSlot) -> Iterator[None]:
    """Hold a slot's lock through another descriptor."""
    descriptor = os.open(slot.path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
