"""What lies in a directory of checkpoints, and in what state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from support import checkpoint_files as made
from support.identities import identity

from grpo_run.runtime.checkpoints import listing, manifest, publishing
from grpo_run.runtime.checkpoints.listing import State


def publish(folder: Path, step: int, **changes: Any) -> Path:
    """One of ours."""
    path = made.plain(folder, step)
    manifest.write_manifest(path, identity(folder, step, **({"world_size": 2} | changes)))
    return path


def test_every_state_is_told(tmp_path: Path) -> None:
    """Newest step first."""
    publish(tmp_path, 90, scheduled=False)
    (publish(tmp_path, 80) / "model.safetensors").write_bytes(b"short")
    (publish(tmp_path, 70) / manifest.MANIFEST).write_text("{")
    made.plain(tmp_path, 60)
    (made.plain(tmp_path, 50) / "optimizer.pt").unlink()
    publishing.reject(made.plain(tmp_path, 40), "a reason")
    os.rename(publish(tmp_path, 30), tmp_path / "replaced-checkpoint-30")
    os.rename(made.plain(tmp_path, 20), tmp_path / ".checkpoint-20.partial-00ff")
    (tmp_path / "runs").mkdir()
    entries = listing.take(tmp_path)
    assert [(entry.step, entry.state) for entry in entries] == [
        (90, State.published),
        (80, State.damaged),
        (70, State.damaged),
        (60, State.complete),
        (50, State.incomplete),
        (40, State.rejected),
        (30, State.replaced),
        (20, State.partial),
    ]
    problems = {entry.step: entry.problem or "" for entry in entries}
    assert "5 bytes" in problems[80]
    assert "optimizer.pt" in problems[50]
    assert problems[40] == "a reason"
    assert entries[0].as_json()["scheduled"] is False
    assert [entry.ranks for entry in entries[:4]] == [2, 2, 2, 2]
    assert all(entry.size_bytes > 0 and entry.when > 0 for entry in entries)


def test_a_flipped_byte_is_seen_only_when_bytes_are_read(tmp_path: Path) -> None:
    """Looking is quick; verifying is certain, and says so."""
    file = publish(tmp_path, 5) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    (looked,) = listing.take(tmp_path)
    assert (looked.state, looked.verified) == (State.published, None)
    (verified,) = listing.take(tmp_path, verify=True)
    assert (verified.state, verified.verified) == (State.damaged, False)
    assert "model.safetensors" in (verified.problem or "")


def test_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    """Without its neighbours."""
    publish(tmp_path, 5)
    publish(tmp_path, 6)
    (entry,) = listing.take(tmp_path / "checkpoint-5", verify=True)
    assert (entry.step, entry.verified) == (5, True)


def test_nothing_is_an_empty_list(tmp_path: Path) -> None:
    """Of a directory that is not there, too."""
    assert listing.take(tmp_path) == []
    assert listing.take(tmp_path / "none") == []


def test_a_runs_directories_come_from_its_journal() -> None:
    """Each once, in the order they were first written to."""
    records = [
        {"event": "checkpoint_published", "path": "/b/checkpoint-1"},
        {"event": "checkpoint_published", "path": "/a/checkpoint-1"},
        {"event": "checkpoint_published", "path": "/b/checkpoint-2"},
        {"event": "checkpoint_published"},
        {"event": "run_ended", "path": "/c/x"},
    ]
    assert listing.output_directories(records) == [Path("/b"), Path("/a")]
