"""Partial directories, publishing by rename, cleanup and rejection."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest
from support import checkpoint_files as made
from support.identities import identity
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints

from grpo_run.runtime.checkpoints import publishing
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import LOCK, read_manifest, write_manifest
from grpo_run.runtime.checkpoints.publishing import (
    REASON,
    clean_partial_directories,
    is_abandoned,
    partial_directory,
    publish,
    reject_checkpoint,
)
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.errors import CheckpointError


def fill(path: Path, *, run_id: str = "run-1", content: bytes = b"weights") -> None:
    """Write a complete checkpoint into an existing directory."""
    (path / "model.safetensors").write_bytes(content)
    write_manifest(path, identity(run_id=run_id))


def publish_step_5(folder: Path, *, run_id: str = "run-1", content: bytes = b"weights") -> Path:
    """Publish checkpoint-5 of a run."""
    final = folder / "checkpoint-5"
    with partial_directory(folder, 5) as partial:
        fill(partial, run_id=run_id, content=content)
        publish(partial, final)
    return final


def abandoned(folder: Path, step: int) -> Path:
    """Create the partial directory of a process that died: its lock is free."""
    path = folder / f".checkpoint-{step}.partial-1f3a"
    path.mkdir(parents=True)
    (path / LOCK).touch()
    return path


def verified_weights(path: Path) -> bytes:
    """Verify a checkpoint and return its weights."""
    verify_digests(path, read_manifest(path).files)
    return (path / "model.safetensors").read_bytes()


def test_a_partial_directory_is_not_a_checkpoint_until_it_is_published(tmp_path: Path) -> None:
    """Neither for us nor for transformers, even if its files are complete."""
    with partial_directory(tmp_path / "out", 5) as partial:
        fill(partial)
        assert list(find_checkpoints(tmp_path / "out")) == []
        assert get_last_checkpoint(str(tmp_path / "out")) is None
        publish(partial, tmp_path / "out" / "checkpoint-5")
    assert [found.path.name for found in find_checkpoints(tmp_path / "out")] == ["checkpoint-5"]
    assert get_last_checkpoint(str(tmp_path / "out")) == str(tmp_path / "out" / "checkpoint-5")
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-5"]
    assert sorted(os.listdir(tmp_path / "out" / "checkpoint-5")) == ["MANIFEST.json", "model.safetensors"]


def test_an_unpublished_directory_is_removed(tmp_path: Path) -> None:
    """It is also removed if writing raises an error."""

    def write() -> None:
        with partial_directory(tmp_path, 5) as partial:
            (partial / "half").write_bytes(b"h")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert os.listdir(tmp_path) == []


def test_a_directory_without_a_manifest_is_not_published(tmp_path: Path) -> None:
    """An existing checkpoint of that name is unchanged."""
    final = publish_step_5(tmp_path)
    with partial_directory(tmp_path, 5) as partial:
        (partial / "model.safetensors").write_bytes(b"half")
        with pytest.raises(CheckpointError):
            publish(partial, final)
    assert verified_weights(final) == b"weights"


def test_a_checkpoint_of_the_same_run_is_replaced(tmp_path: Path) -> None:
    """A step may be repeated after a recovery; the old directory is deleted."""
    publish_step_5(tmp_path)
    final = publish_step_5(tmp_path, content=b"newer")
    assert verified_weights(final) == b"newer"
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_a_checkpoint_of_another_run_is_kept_under_another_name(tmp_path: Path) -> None:
    """The name is unused and is not a checkpoint's."""
    for number in range(3):
        publish_step_5(tmp_path, run_id=f"run-{number}", content=b"%d" % number)
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-5",
        "replaced-checkpoint-5",
        "replaced-checkpoint-5.2",
    ]
    assert verified_weights(tmp_path / "checkpoint-5") == b"2"
    assert verified_weights(tmp_path / "replaced-checkpoint-5") == b"0"
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")


@pytest.mark.parametrize("sign", ["grpo_run/state.pt", LOCK, ".MANIFEST.json.tmp", None])
def test_a_half_written_checkpoint_of_ours_is_replaced(tmp_path: Path, sign: str | None) -> None:
    """Left by a killed process, or an empty directory."""
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    if sign is not None:
        (path / "config.json").write_text("{}")
        (path / sign).parent.mkdir(exist_ok=True)
        (path / sign).write_bytes(b"")
    assert verified_weights(publish_step_5(tmp_path)) == b"weights"
    assert os.listdir(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("name", ["model.safetensors", "MANIFEST.json"])
def test_a_directory_that_may_be_the_scripts_own_is_kept(tmp_path: Path, name: str) -> None:
    """A model that the script saved, or a manifest that cannot be read."""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / name).write_bytes(b"own")
    assert verified_weights(publish_step_5(tmp_path)) == b"weights"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "replaced-checkpoint-5"]
    assert (tmp_path / "replaced-checkpoint-5" / name).read_bytes() == b"own"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Cleanup skips directories that were written to recently."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_directory(tmp_path, 5) as partial:
        fill(partial)
        assert clean_partial_directories(tmp_path) == []
        assert not is_abandoned(partial)
        publish(partial, tmp_path / "checkpoint-5")
    assert verified_weights(tmp_path / "checkpoint-5") == b"weights"
    dead = abandoned(tmp_path, 6)
    for path in (dead / LOCK, dead):
        os.utime(path, (1e9, 1e9))
    assert clean_partial_directories(tmp_path) == [dead]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_a_partial_directory_that_cannot_be_created_raises_oserror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempts leave nothing behind."""
    monkeypatch.setattr(publishing, "lock_file", lambda descriptor: False)
    with pytest.raises(OSError, match="could be created"), partial_directory(tmp_path, 5):
        pass
    assert os.listdir(tmp_path) == []


def test_a_replaced_directory_that_cannot_be_renamed_does_not_fail_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next cleanup renames it."""
    publish_step_5(tmp_path, run_id="run-0", content=b"old")

    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if target.name.startswith("replaced-"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        assert verified_weights(publish_step_5(tmp_path, content=b"new")) == b"new"
    clean_partial_directories(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "replaced-checkpoint-5"]
    assert verified_weights(tmp_path / "replaced-checkpoint-5") == b"old"


class Killed(BaseException):
    """Stands for the death of the process."""


def test_a_kill_at_any_rename_loses_neither_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the next cleanup, the old or the new checkpoint has the name and passes verification."""
    real = os.rename
    for deadly in (1, 2, 3):
        folder = tmp_path / str(deadly)
        publish_step_5(folder, run_id="run-0", content=b"old")
        calls = 0

        def rename(source: Path, target: Path, deadly: int = deadly) -> None:
            nonlocal calls
            calls += 1
            if calls == deadly:
                raise Killed
            real(source, target)

        path = abandoned(folder, 5)
        fill(path, content=b"new")
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            with pytest.raises(Killed):
                publish(path, folder / "checkpoint-5")
        clean_partial_directories(folder)
        assert verified_weights(folder / "checkpoint-5") == (b"old" if deadly < 3 else b"new")
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert verified_weights(tmp_path / "3" / "replaced-checkpoint-5") == b"old"


def test_a_failed_rename_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may fail the second rename."""
    final = publish_step_5(tmp_path)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(5, "Input/output error")
        real(source, target)

    with partial_directory(tmp_path, 5) as partial:
        fill(partial, content=b"new")
        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(OSError, match="Input/output"):
            publish(partial, final)
    assert verified_weights(final) == b"weights"


def test_cleanup_deletes_only_abandoned_partial_directories(tmp_path: Path) -> None:
    """The lock decides, not the age."""
    with partial_directory(tmp_path, 5) as busy:
        dead = abandoned(tmp_path, 5)
        bare = tmp_path / ".checkpoint-7.partial-00ff"
        bare.mkdir()
        assert is_abandoned(dead)
        assert not is_abandoned(busy)
        assert sorted(clean_partial_directories(tmp_path)) == sorted([dead, bare])
        assert busy.is_dir()
        fill(busy)
        publish(busy, tmp_path / "checkpoint-5")
    assert verified_weights(tmp_path / "checkpoint-5") == b"weights"


def test_cleanup_ignores_all_other_directories(tmp_path: Path) -> None:
    """A missing output directory is not an error."""
    publish_step_5(tmp_path)
    names = [".checkpoint-5.partial-notes", ".cache", "rejected-checkpoint-3", "checkpoint-9"]
    for name in names:
        (tmp_path / name).mkdir()
    assert clean_partial_directories(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "checkpoint-5"])
    assert clean_partial_directories(tmp_path / "none") == []


def test_a_rejected_checkpoint_is_kept_with_the_reason(tmp_path: Path) -> None:
    """Transformers neither loads nor rotates it."""
    names = []
    for _ in range(2):
        path = made.plain(tmp_path, 9)
        moved = reject_checkpoint(path, "model.safetensors does not match its digest")
        assert moved is not None
        names.append(moved.name)
        assert not path.exists()
        reason = json.loads((moved / REASON).read_text())
        assert (reason["reason"], reason["was"]) == ("model.safetensors does not match its digest", str(path))
    assert names == ["rejected-checkpoint-9", "rejected-checkpoint-9.2"]
    for step in (1, 2):
        made.plain(tmp_path, step)
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=2, use_mtime=True)
    assert {"checkpoint-1", "checkpoint-2", *names} == set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")]
)
def test_a_checkpoint_that_cannot_be_renamed_is_not_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The result is None and the directory is unchanged."""
    path = made.plain(tmp_path, 9)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "rename", refuse)
    assert reject_checkpoint(path, "bad") is None
    assert path.is_dir()


def test_a_checkpoint_is_rejected_even_if_the_reason_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "write_json", full)
    assert reject_checkpoint(made.plain(tmp_path, 9), "bad") == tmp_path / "rejected-checkpoint-9"
