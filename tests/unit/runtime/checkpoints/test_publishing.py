"""Partial directories, publishing by rename, cleanup and rejection."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from support import checkpoint_files as made
from support.identities import identity

from grpo_run.runtime.checkpoints import publishing
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import LOCK, read_manifest, write_manifest
from grpo_run.runtime.checkpoints.publishing import (
    clean_partial_directories,
    is_abandoned,
    partial_directory,
    publish,
    reject_checkpoint,
)


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
