"""Atomic JSON files, appended lines, fsync of files and directories, and file locks."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest

from grpo_run.runtime.files import append_lines, lock_file, short_path, sync_directory, tree_bytes, write_json


def test_a_value_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    """The old content stays, and no temporary file remains."""
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"b": 2, "c": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, the old content stays, and no temporary file remains."""
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_file_has_mode_0600_and_no_temporary_file_remains(tmp_path: Path) -> None:
    """Only the owner can read it."""
    write_json(tmp_path / "run.json", {"a": "fünf"})
    assert stat.S_IMODE((tmp_path / "run.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_any_argument_that_a_shell_can_pass_is_written(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 arrive as lone surrogates."""
    write_json(tmp_path / "run.json", {"arguments": ["--name=\udcff"]})
    assert json.loads((tmp_path / "run.json").read_bytes())["arguments"] == ["--name=\udcff"]


@pytest.mark.parametrize(("durable", "synced"), [(True, ["file", "directory"]), (False, [])])
def test_a_durable_write_syncs_the_file_and_then_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, synced: list[str]
) -> None:
    """A write that need not survive a crash of the machine costs no fsync."""
    seen = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        seen.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_json(tmp_path / "run.json", {}, durable=durable)
    assert seen == synced


@pytest.mark.parametrize(
    ("number", "raises"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_only_a_disk_error_of_a_directory_fsync_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, raises: bool
) -> None:
    """Some file systems cannot fsync a directory; that is not an error."""

    def fsync(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    if raises:
        with pytest.raises(OSError, match="Input/output error"):
            sync_directory(tmp_path)
    else:
        sync_directory(tmp_path)


def test_a_lock_is_exclusive_between_descriptors(tmp_path: Path) -> None:
    """The second descriptor gets the lock when the first is closed."""
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert lock_file(first)
    assert not lock_file(second, wait_seconds=0.01)
    os.close(first)
    assert lock_file(second)
    os.close(second)


def test_the_space_of_a_tree_is_what_its_files_take(tmp_path: Path) -> None:
    """Symbolic links are not followed."""
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    file = tmp_path / "folder" / "inner" / "file"
    file.write_bytes(b"x" * 10_000)
    taken = file.stat().st_blocks * 512
    (tmp_path / "outside").write_bytes(b"x" * 50_000)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder" / "broken").symlink_to(tmp_path / "nothing")
    links = sum((tmp_path / "folder" / name).lstat().st_blocks * 512 for name in ("link", "broken"))
    assert tree_bytes(tmp_path / "folder") == taken + links
    assert (tree_bytes(file), tree_bytes(tmp_path / "nothing")) == (taken, 0)


def test_a_path_is_shown_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is elsewhere; also if the working directory was deleted."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert short_path(tmp_path / "here" / "runs" / "x") == "runs/x"
    assert short_path(tmp_path / "there") == str(tmp_path / "there")
    assert short_path("runs/x") == "runs/x"
    (tmp_path / "here").rmdir()
    assert short_path("runs/x") == "runs/x"


def test_lines_are_appended_as_a_whole_and_privately(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a line that was cut, too; one that does not fit is an error."""
    file = tmp_path / "lines"
    assert append_lines(file, b"one\n") == 4
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(b"one\ntw")
    assert append_lines(file, b"three\nfour\n") == file.stat().st_size
    assert file.read_bytes() == b"one\ntw\nthree\nfour\n"
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    with pytest.raises(OSError, match="the disk is full"):
        append_lines(file, b"five\n")
