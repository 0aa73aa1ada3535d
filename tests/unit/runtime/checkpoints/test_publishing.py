"""A checkpoint's directory while it is written, and the rename that makes it one."""

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
from grpo_run.runtime.checkpoints.manifest import read_manifest, write_manifest
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
    """A complete checkpoint in a directory that is there."""
    (path / "model.safetensors").write_bytes(content)
    write_manifest(path, identity(run_id=run_id))


def published(folder: Path, *, run_id: str = "run-1", content: bytes = b"weights") -> Path:
    """checkpoint-5 of a run, published."""
    final = folder / "checkpoint-5"
    with partial_directory(folder, 5) as partial:
        fill(partial, run_id=run_id, content=content)
        publish(partial, final)
    return final


def sound(path: Path) -> bytes:
    """The weights of a checkpoint that verifies."""
    verify_digests(path, read_manifest(path).files)
    return (path / "model.safetensors").read_bytes()


def test_a_partial_directory_is_no_checkpoint_for_anyone(tmp_path: Path) -> None:
    """Neither for us nor for transformers, however complete it is; published, it is one for both."""
    with partial_directory(tmp_path / "out", 5) as partial:
        fill(partial)
        assert list(find_checkpoints(tmp_path / "out")) == []
        assert get_last_checkpoint(str(tmp_path / "out")) is None
        publish(partial, tmp_path / "out" / "checkpoint-5")
    assert [found.path.name for found in find_checkpoints(tmp_path / "out")] == ["checkpoint-5"]
    assert get_last_checkpoint(str(tmp_path / "out")) == str(tmp_path / "out" / "checkpoint-5")
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-5"]
    assert sorted(os.listdir(tmp_path / "out" / "checkpoint-5")) == ["MANIFEST.json", "model.safetensors"]


def test_what_was_not_published_is_removed(tmp_path: Path) -> None:
    """Also when writing failed."""

    def write() -> None:
        with partial_directory(tmp_path, 5) as partial:
            (partial / "half").write_bytes(b"h")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert os.listdir(tmp_path) == []


def test_without_a_manifest_nothing_is_published(tmp_path: Path) -> None:
    """And what was there stays."""
    final = published(tmp_path)
    with partial_directory(tmp_path, 5) as partial:
        (partial / "model.safetensors").write_bytes(b"half")
        with pytest.raises(CheckpointError):
            publish(partial, final)
    assert sound(final) == b"weights"


def test_the_same_runs_older_one_is_replaced(tmp_path: Path) -> None:
    """A step done again after a recovery; nothing of the old one is left."""
    published(tmp_path)
    final = published(tmp_path, content=b"newer")
    assert sound(final) == b"newer"
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_another_runs_complete_one_is_kept_aside(tmp_path: Path) -> None:
    """Under a name that is free, and is no checkpoint's."""
    for number in range(3):
        published(tmp_path, run_id=f"run-{number}", content=b"%d" % number)
    assert sorted(os.listdir(tmp_path)) == [
        "checkpoint-5",
        "replaced-checkpoint-5",
        "replaced-checkpoint-5.2",
    ]
    assert sound(tmp_path / "checkpoint-5") == b"2"
    assert sound(tmp_path / "replaced-checkpoint-5") == b"0"
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-5")


@pytest.mark.parametrize("sign", ["grpo_run/state.pt", publishing.LOCK, ".MANIFEST.json.tmp", None])
def test_a_half_written_one_of_ours_is_replaced(tmp_path: Path, sign: str | None) -> None:
    """What we had left there when we were killed, and an empty directory."""
    path = tmp_path / "checkpoint-5"
    path.mkdir()
    if sign is not None:
        (path / "config.json").write_text("{}")
        (path / sign).parent.mkdir(exist_ok=True)
        (path / sign).write_bytes(b"")
    assert sound(published(tmp_path)) == b"weights"
    assert os.listdir(tmp_path) == ["checkpoint-5"]


@pytest.mark.parametrize("name", ["model.safetensors", "MANIFEST.json"])
def test_what_may_be_the_scripts_own_is_kept_aside(tmp_path: Path, name: str) -> None:
    """Nothing says that it was ours: a model the script saved, or a manifest that cannot be read."""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / name).write_bytes(b"own")
    assert sound(published(tmp_path)) == b"weights"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "replaced-checkpoint-5"]
    assert (tmp_path / "replaced-checkpoint-5" / name).read_bytes() == b"own"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whoever cleans up there leaves alone what was written to lately."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with partial_directory(tmp_path, 5) as partial:
        fill(partial)
        assert clean_partial_directories(tmp_path) == []
        assert not is_abandoned(partial)
        publish(partial, tmp_path / "checkpoint-5")
    assert sound(tmp_path / "checkpoint-5") == b"weights"
    dead, descriptor = publishing._create_partial(tmp_path, 6)
    os.close(descriptor)
    for path in (dead / publishing.LOCK, dead):
        os.utime(path, (1e9, 1e9))
    assert clean_partial_directories(tmp_path) == [dead]
    assert os.listdir(tmp_path) == ["checkpoint-5"]


def test_a_directory_that_cannot_be_had_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left of the tries."""
    monkeypatch.setattr(publishing, "_lock", lambda *args, **options: None)
    with pytest.raises(OSError, match="could be created"):
        publishing._create_partial(tmp_path, 5)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_put_aside_does_not_fail_what_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits under a name of its own for the next clean-up."""
    published(tmp_path, run_id="run-0", content=b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_rename_to_free_name", refuse)
        assert sound(published(tmp_path, content=b"new")) == b"new"
    clean_partial_directories(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-5", "replaced-checkpoint-5"]
    assert sound(tmp_path / "replaced-checkpoint-5") == b"old"


class Killed(BaseException):
    """As far as files go."""


def test_killed_at_any_rename_neither_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old or the new one has the name after the next clean-up, whole."""
    real = os.rename
    for deadly in (1, 2, 3):
        folder = tmp_path / str(deadly)
        published(folder, run_id="run-0", content=b"old")
        calls = 0

        def rename(source: Path, target: Path, deadly: int = deadly) -> None:
            nonlocal calls
            calls += 1
            if calls == deadly:
                raise Killed
            real(source, target)

        descriptor = None
        path, descriptor = publishing._create_partial(folder, 5)
        fill(path, content=b"new")
        with monkeypatch.context() as patch:
            patch.setattr(publishing.os, "rename", rename)
            with pytest.raises(Killed):
                publish(path, folder / "checkpoint-5")
        os.close(descriptor)  # the kernel does, of a process that is gone
        clean_partial_directories(folder)
        assert sound(folder / "checkpoint-5") == (b"old" if deadly < 3 else b"new")
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert sound(tmp_path / "3" / "replaced-checkpoint-5") == b"old"


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may refuse the second of the two."""
    final = published(tmp_path)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(5, "Input/output error")
        real(source, target)

    with partial_directory(tmp_path, 5) as partial:
        fill(partial, content=b"new")
        monkeypatch.setattr(publishing.os, "rename", rename)
        with pytest.raises(OSError, match="Input/output"):
            publish(partial, final)
    assert sound(final) == b"weights"


def test_only_abandoned_partials_are_cleaned(tmp_path: Path) -> None:
    """The lock tells them apart, not their age."""
    with partial_directory(tmp_path, 5) as busy:
        dead, descriptor = publishing._create_partial(tmp_path, 5)
        os.close(descriptor)
        bare = tmp_path / ".checkpoint-7.partial-00ff"
        bare.mkdir()
        assert is_abandoned(dead)
        assert not is_abandoned(busy)
        assert sorted(clean_partial_directories(tmp_path)) == sorted([dead, bare])
        assert busy.is_dir()
        fill(busy)
        publish(busy, tmp_path / "checkpoint-5")
    assert sound(tmp_path / "checkpoint-5") == b"weights"


def test_cleaning_leaves_everything_else_alone(tmp_path: Path) -> None:
    """Checkpoints, what lies aside, and other people's hidden files; a folder that is not there is clean."""
    published(tmp_path)
    names = [".checkpoint-5.partial-notes", ".cache", "rejected-checkpoint-3", "checkpoint-9"]
    for name in names:
        (tmp_path / name).mkdir()
    assert clean_partial_directories(tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "checkpoint-5"])
    assert clean_partial_directories(tmp_path / "none") == []


def test_a_rejected_checkpoint_is_kept_and_nobodys_checkpoint(tmp_path: Path) -> None:
    """With the reason; transformers neither loads it nor counts it when it rotates."""
    names = []
    for _ in range(2):
        path = made.plain(tmp_path, 9)
        moved = reject_checkpoint(path, "model.safetensors does not match its digest")
        assert moved is not None
        names.append(moved.name)
        assert not path.exists()
        reason = json.loads((moved / REASON).read_text())
        assert (reason["reason"], reason["was"]) == (
            "model.safetensors does not match its digest",
            str(path),
        )
    assert names == ["rejected-checkpoint-9", "rejected-checkpoint-9.2"]
    for step in (1, 2):
        made.plain(tmp_path, step)
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=2, use_mtime=True)
    assert {"checkpoint-1", "checkpoint-2", *names} == set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(30, "Read-only file system")]
)
def test_what_cannot_be_renamed_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """It stays where it is, and who asked is told."""
    path = made.plain(tmp_path, 9)

    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(publishing.os, "rename", refuse)
    assert reject_checkpoint(path, "bad") is None
    assert path.is_dir()


def test_a_reason_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a likely reason for what was found bad."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publishing, "write_json", full)
    assert reject_checkpoint(made.plain(tmp_path, 9), "bad") == tmp_path / "rejected-checkpoint-9"
