"""The files of an attempt."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.history import attempt_files
from grpo_run.runtime.history.attempt_files import MAX_SOCKET_PATH_BYTES, AttemptFiles
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.observation import Phase, RankError


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., AttemptFiles]:
    """Create the files of an attempt whose run has a short or a long path."""

    def files(number: int = 3, folder: str = "run") -> AttemptFiles:
        return AttemptFiles(RunDirectory(path=tmp_path / folder), number)

    return files


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("refused", ["mkdir", "touch"])
@pytest.mark.parametrize("temporary", [True, False])
def test_if_the_disk_refuses_the_files_are_in_a_temporary_directory(
    make: Callable[..., AttemptFiles],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    refused: str,
    temporary: bool,
) -> None:
    """A recovery needs files: a disk that is full, or read-only after errors, does not end the run.

    If there is no space for temporary files either, they are in shared memory.
    """
    wanted = tmp_path / ("temporary" if temporary else "memory")
    wanted.mkdir()
    monkeypatch.setattr(attempt_files, "SHARED_MEMORY_ROOT", tmp_path / "memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    files = make()

    def full(self: Path, *args: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as disk:
        disk.setattr(Path, refused, full)
        error = files.make()
    assert error is not None
    assert error.errno == number
    folder = files.folder
    assert folder.parent == wanted
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {files.log(0).parent, files.stacks(0).parent, files.error(1).parent} == {folder}


def test_errors_of_an_unrecorded_attempt_are_removed(make: Callable[..., AttemptFiles]) -> None:
    """The journal lost an attempt of this number; its errors and sockets do not belong to the new ranks."""
    files = make()
    files.make()
    files.error(0).write_text("{}")
    # `files.socket` may choose a shorter directory, which is always new
    socket = files.log(1).with_name("rank1.sock")
    socket.touch()
    files.log(0).write_text("kept")
    assert files.make() is None
    assert not files.error(0).exists()
    assert not socket.exists()
    assert files.log(0).read_text() == "kept"


def test_ranks_and_attempts_do_not_share_files(make: Callable[..., AttemptFiles]) -> None:
    """Every path is different."""
    paths = [
        path
        for number in (0, 1)
        for rank in (0, 1, 10)
        for files in [make(number)]
        for path in (files.log(rank), files.stacks(rank), files.error(rank))
    ]
    assert len(set(paths)) == len(paths)
    assert make(3).log(1).parent.name == "003"


def test_the_directory_has_mode_0700_and_is_empty(make: Callable[..., AttemptFiles]) -> None:
    """Creating it twice is allowed."""
    files = make()
    files.make()
    files.make()
    folder = files.log(0).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_a_socket_with_a_short_path_is_beside_the_log(tmp_path: Path) -> None:
    """A relative run directory is short."""
    files = AttemptFiles(RunDirectory(path=Path("runs/a")), 0)
    assert files.socket(2) == files.log(2).with_suffix(".sock")


def test_sockets_of_a_run_with_a_long_path_are_in_a_temporary_directory(
    make: Callable[..., AttemptFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is within the limit of the kernel, and only the owner can open it. Closing removes it. $TMPDIR
    may be as long as the path of the run.
    """
    long = tmp_path / ("t" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    files = make(folder="x" * 120)
    paths = [files.socket(rank) for rank in (0, 1)]
    assert all(len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES for path in paths)
    assert len(set(paths)) == 2
    (folder,) = {path.parent for path in paths}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert files.socket(0) == paths[0]
    files.close()
    assert not folder.exists()


def test_the_length_limit_of_sockets_is_in_bytes(tmp_path: Path) -> None:
    """A character may take several."""
    name = "ü" * 45  # below the limit in characters, above it in bytes
    files = AttemptFiles(RunDirectory(path=Path("/" + name)), 0)
    path = files.socket(0)
    assert name not in str(path)
    files.close()


def test_an_error_is_read_as_the_rank_wrote_it(make: Callable[..., AttemptFiles]) -> None:
    """The error may have a location or none."""
    files = make()
    files.make()
    value = {
        "type": "KeyError",
        "message": "'x'",
        "traceback": "…",
        "location": ["train.py", 3, "f"],
        "wall_time": 5.0,
    }
    files.error(0).write_text(json.dumps(value))
    expected = RankError(
        type="KeyError", message="'x'", traceback="…", location=("train.py", 3, "f"), wall_time=5.0
    )
    assert files.read_error(0) == expected
    files.error(0).write_text(
        json.dumps({**value, "phases": [Phase.data, Phase.callback], "callback": "Mine.on_save"})
    )
    assert files.read_error(0) == replace(
        expected, phases=(Phase.data, Phase.callback), callback="Mine.on_save"
    )
    files.error(0).write_text(json.dumps({**value, "location": None}))
    found = files.read_error(0)
    assert found is not None
    assert found.location is None


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        '{"type": "KeyErr',
        "5",
        "{}",
        '{"type": "a", "message": "b", "traceback": "c", "location": [1], "wall_time": 1}',
        '{"type": "a", "message": "b", "traceback": "c", "location": null, "wall_time": "late"}',
    ],
)
def test_an_incomplete_error_file_is_ignored(make: Callable[..., AttemptFiles], content: str | None) -> None:
    """The rank had no time to finish it, or another program wrote it."""
    files = make()
    files.make()
    if content is not None:
        files.error(0).write_text(content)
    assert files.read_error(0) is None
