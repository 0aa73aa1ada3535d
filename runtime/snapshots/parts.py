"""The parts of a snapshot that several hosts take: which files each of them wrote, and which parts are here.

    slot0/PARTS.json    the snapshot, of how many hosts it is, and the files of each part that is in the slot

A part has the number that its host had then; nothing depends on who has it now. The slot gets `STAGED.json`,
and the snapshot is complete for everything else, when the last part has come. Ranks write the record
(`runtime/rank/saving/`, `runtime/rank/host_link.py`), and read those of all hosts when they resume. Copies
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import pydantic

from grpo_run.runtime.checkpoints.digests import FileEntry
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import write_json
from grpo_run.runtime.snapshots.slot import PARTS, SCHEMA, STAGED, StagedSnapshot, StagingSlot, path_of


class Parts(pydantic.BaseModel):
    """The contents of `PARTS.json`.

    Attributes:
        staged: the snapshot, as rank 0 has described it.
        hosts: how many hosts have taken it.
        files: of each part that is here, as they are sent to other hosts. Before a part is sent for the first
            time, its files have no digest.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    staged: StagedSnapshot
    hosts: int
    files: dict[int, dict[str, FileEntry]] = {}

    def with_part(self, part: int, files: dict[str, FileEntry]) -> Parts:
        """Return the record with a part that has come."""
        return self.model_copy(update={"files": {**self.files, part: files}})


def read_parts(slot: StagingSlot) -> Parts | None:
    """Return what the slot has of a snapshot; None if nothing that can be read.

    A snapshot that one host has taken is a single part.
    """
    try:
        parts = Parts.model_validate_json((slot.path / PARTS).read_bytes())
        if parts.staged.schema_version == SCHEMA:
            return parts
    except (OSError, pydantic.ValidationError):
        pass
    try:
        staged = slot.read_snapshot()
    except CheckpointError:
        return None
    if staged is None or staged.files is None:
        return None
    return Parts(staged=staged, hosts=1, files={0: entries(staged.files)})


def entries(sizes: Mapping[str, int]) -> dict[str, FileEntry]:
    """Return the record of a part that the ranks of this host have written, from the sizes of its files."""
    return {name: FileEntry(size=size_bytes, blake3="") for name, size_bytes in sizes.items()}


def record_parts(slot: StagingSlot, parts: Parts) -> None:
    """Replace the record of a slot that is prepared, and declare the snapshot complete with its last part.

    Raises:
        OSError: there is no memory for it.
    """
    write_json(slot.path / PARTS, parts.model_dump(), durable=False)
    if len(parts.files) == parts.hosts and not (slot.path / STAGED).exists():
        slot.record_files(parts.staged)
        slot.complete_snapshot()


def is_on_disk(staged: StagedSnapshot) -> bool:
    """Whether the checkpoint of a snapshot was written to disk, by whichever host."""
    path = path_of(staged)
    try:
        found, written_at = read_manifest(path), (path / MANIFEST).stat().st_mtime
    except (CheckpointError, OSError):
        return False
    same = (found.train_call_key, found.step) == (staged.train_call_key, staged.step)
    return same and written_at > staged.staged_at  # else an earlier attempt has taken the same step
