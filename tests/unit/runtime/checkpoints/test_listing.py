"""The state of every checkpoint directory, as `grpo-run checkpoints` lists it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support import checkpoint_files as made
from support.identities import identity

from grpo_run.runtime.checkpoints.listing import CheckpointState, list_checkpoints
from grpo_run.runtime.checkpoints.manifest import MANIFEST, write_manifest
from grpo_run.runtime.checkpoints.publishing import reject_checkpoint


def publish(folder: Path, step: int, **changes: Any) -> Path:
    """A checkpoint with a manifest."""
    path = made.plain(folder, step)
    write_manifest(path, identity(folder, step, **({"world_size": 2} | changes)))
    return path


def test_every_state_is_listed_newest_step_first(tmp_path: Path) -> None:
    """Each state with its problem; other directories are ignored."""
    publish(tmp_path, 90, scheduled=False)
    (publish(tmp_path, 80) / "model.safetensors").write_bytes(b"short")
    (publish(tmp_path, 70) / MANIFEST).write_text("{")
    made.plain(tmp_path, 60)
    (made.plain(tmp_path, 50) / "optimizer.pt").unlink()
    reject_checkpoint(made.plain(tmp_path, 40), "a reason")
    os.rename(publish(tmp_path, 30), tmp_path / "replaced-checkpoint-30")
    os.rename(made.plain(tmp_path, 20), tmp_path / ".checkpoint-20.partial-00ff")
    (tmp_path / "runs").mkdir()
    entries = list_checkpoints(tmp_path)
    assert [(entry.step, entry.state) for entry in entries] == [
        (90, CheckpointState.published),
        (80, CheckpointState.damaged),
        (70, CheckpointState.damaged),
        (60, CheckpointState.complete),
        (50, CheckpointState.incomplete),
        (40, CheckpointState.rejected),
        (30, CheckpointState.replaced),
        (20, CheckpointState.partial),
    ]
    problems = {entry.step: entry.problem or "" for entry in entries}
    assert "5 bytes" in problems[80]
    assert "optimizer.pt" in problems[50]
    assert problems[40] == "a reason"
    assert entries[0].as_json()["scheduled"] is False
    assert [entry.ranks for entry in entries[:4]] == [2, 2, 2, 2]
    assert all(entry.size_bytes > 0 and entry.modified_at > 0 for entry in entries)


def test_a_flipped_byte_is_found_only_by_verification(tmp_path: Path) -> None:
    """Without it the entry says that digests were not compared."""
    file = publish(tmp_path, 5) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (listed,) = list_checkpoints(tmp_path)
    assert (listed.state, listed.verified) == (CheckpointState.published, None)
    (verified,) = list_checkpoints(tmp_path, verify=True)
    assert (verified.state, verified.verified) == (CheckpointState.damaged, False)
    assert "model.safetensors" in (verified.problem or "")


def test_one_checkpoint_can_be_listed_alone(tmp_path: Path) -> None:
    """Its siblings are not listed."""
    publish(tmp_path, 5)
    publish(tmp_path, 6)
    (entry,) = list_checkpoints(tmp_path / "checkpoint-5", verify=True)
    assert (entry.step, entry.verified) == (5, True)


def test_an_empty_or_missing_directory_gives_an_empty_list(tmp_path: Path) -> None:
    """No exception is raised."""
    assert list_checkpoints(tmp_path) == []
    assert list_checkpoints(tmp_path / "none") == []
