"""The manifest: what it contains, when it is written, and when it is not accepted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support.identities import identity
from support.manifests import FILES, fill, publish
from support.slots import snapshot

from grpo_run.runtime.checkpoints.manifest import (
    FORMAT_LIBRARIES,
    MANIFEST,
    SCHEMA,
    read_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.upstream.versions import installed_versions


def test_reading_returns_the_manifest_that_was_written(tmp_path: Path) -> None:
    """Every field."""
    manifest = publish(tmp_path / "checkpoint-5")
    assert read_manifest(tmp_path / "checkpoint-5") == manifest
    assert (manifest.run_id, manifest.step, manifest.world_size) == ("run-1", 5, 2)
    assert manifest.train_call == identity().train_call
    assert manifest.finished is False


def test_a_directory_without_files_gets_no_manifest(tmp_path: Path) -> None:
    """Otherwise it would be the newest checkpoint."""
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        write_manifest(tmp_path / "checkpoint-5", identity())
    assert list(find_checkpoints(tmp_path)) == []


def test_every_library_that_defines_the_format_has_a_version() -> None:
    """No version is empty."""
    versions = installed_versions(FORMAT_LIBRARIES)
    assert {"grpo-run", "torch", "transformers", "trl"} <= set(versions)
    assert all(versions.values())


def test_fields_of_a_staged_snapshot_are_not_stored_in_the_manifest(tmp_path: Path) -> None:
    """Only the fields of `Identity` are copied."""
    staged = snapshot(tmp_path, limit=2, best="checkpoint-3", schema_version=7)
    path = fill(tmp_path / staged.folder)
    write_manifest(path, staged)
    raw = json.loads((path / MANIFEST).read_text())
    assert set(raw) == {
        "schema_version", "run_id", "train_call", "step", "world_size", "finished", "scheduled", "kept",
        "global_batch",
        "per_device_train_batch_size", "gradient_accumulation_steps", "layout", "model_shape", "versions",
        "files",
        "seal",
    }  # fmt: skip
    assert raw["schema_version"] == SCHEMA


def test_every_file_is_synced_before_the_manifest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and folder is synced without a manifest, and the directory again after it."""
    path = fill(tmp_path / "checkpoint-5")
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((Path(name), (path / MANIFEST).exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_manifest(path, identity())
    before = {name for name, published in synced if not published}
    assert {path / name for name in FILES} | {path, path / "global_step5"} <= before
    assert (path, True) in synced


def test_a_failed_sync_leaves_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may report a full disk only at fsync."""
    path = fill(tmp_path / "checkpoint-5")

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write_manifest(path, identity())
    assert not (path / MANIFEST).exists()
