"""The run directory: its lock, its permissions, and how a run is found."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.journal import event

from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory, default_run_id
from grpo_run.runtime.processes.identity import own_identity


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory that exists."""
    directory = RunDirectory(path=tmp_path / "runs" / "train-abc123")
    directory.create()
    return directory


def mode(path: Path) -> int:
    """Return the permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_that_is_written_into_it_is_known_as_ours(run: RunDirectory) -> None:
    """A refused launch deletes it, also what a killed process was replacing. Files of the user stay."""
    ours = {path for name in vars(RunDirectory) if isinstance(path := getattr(run, name), Path)}
    ours |= {run.path / ".run.json.4711", run.path / "board.mmap.new"}
    for path in ours:
        if not path.exists():
            path.touch()
    (run.path / "checkpoint-5").mkdir()
    assert ours < {*run.path.iterdir()}
    assert {*run.path.iterdir()} - {*run.own_files()} == {run.path / "checkpoint-5"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["train.py", "--lr", "1"], ["train.py", "--lr", "2"]),
        (["train.py", "a b"], ["train.py", "a", "b"]),
        (["train.py"], ["train.py", ""]),
    ],
)
def test_another_command_has_another_run_id(one: list[str], other: list[str]) -> None:
    """Word boundaries count."""
    assert default_run_id("train.py", one) != default_run_id("train.py", other)


def test_the_same_command_is_the_same_run_and_in_another_directory_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its relative paths refer to other files there."""
    here = default_run_id("train.py", ["train.py"])
    assert default_run_id("train.py", ["train.py"]) == here
    monkeypatch.chdir(tmp_path)
    assert default_run_id("train.py", ["train.py"]) != here


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("train.py", "train"),
        ("scripts/grpo train!.py", "grpo-train"),
        ("/abs/v1.2/run.py", "run"),
        ("package.module", "package.module"),
        ("...", "run"),
        ("日本.py", "run"),
    ],
)
def test_a_run_id_begins_with_the_scripts_name(target: str, name: str) -> None:
    """It is also a valid name of a directory."""
    run_id = default_run_id(target, [target])
    assert run_id.rpartition("-")[0] == name
    assert "/" not in run_id


def test_the_directory_has_mode_0700(run: RunDirectory) -> None:
    """Its folders have the same mode."""
    assert [mode(path) for path in (run.path, run.incidents, run.path / "attempts")] == [0o700] * 3


@pytest.mark.parametrize("open_to", [0o777, 0o770, 0o702, 0o1777])
def test_an_empty_directory_that_others_can_write_becomes_private(tmp_path: Path, open_to: int) -> None:
    """And the user is told."""
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(open_to)
    changed = RunDirectory(path=path).create()
    assert changed is not None
    assert f"(mode {open_to:04o}); its mode is 0700 now" in changed
    assert mode(path) == 0o700
    assert RunDirectory(path=path).create() is None


@pytest.mark.parametrize("name", ["run.json", "somebody's"])
def test_a_used_directory_that_others_can_write_is_refused(tmp_path: Path, name: str) -> None:
    """What lies in it may be another user's, or needed by others: nothing is changed."""
    (tmp_path / name).write_text("{}")
    tmp_path.chmod(0o777)
    with pytest.raises(RunDirectoryError, match=r"can be written by other users \(mode 0777\).*chmod 700"):
        RunDirectory(path=tmp_path).create()
    assert mode(tmp_path) == 0o777
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("readable", [0o700, 0o750, 0o755])
def test_a_directory_that_others_can_only_read_is_taken_as_it_is(tmp_path: Path, readable: int) -> None:
    """The user may share the logs."""
    tmp_path.chmod(readable)
    assert RunDirectory(path=tmp_path).create() is None
    assert mode(tmp_path) == readable


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("name", ["", "run.json", "attempts"])
def test_a_directory_or_record_of_another_user_is_refused(tmp_path: Path, name: str) -> None:
    """They could change it during the run."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    if name:
        (path / name).mkdir()
    os.chown(path / name, 4711, -1)
    with pytest.raises(RunDirectoryError, match=r"belongs to another user \(4711\)"):
        RunDirectory(path=path).create()


def test_creating_it_again_changes_nothing(run: RunDirectory) -> None:
    """The same command returns to its run."""
    run.write_run({"run_id": "x"})
    run.create()
    assert run.read_run() == {"run_id": "x"}
    assert {path.name for path in run.path.iterdir()} == {"attempts", "incidents", "run.json"}


def test_a_directory_that_cannot_be_created_is_a_one_line_error(tmp_path: Path) -> None:
    """It contains the path, the reason and the flag to use."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory(path=tmp_path / "file" / "run").create()
    message = str(caught.value)
    assert str(tmp_path / "file" / "run") in message
    assert "--run-dir" in message
    assert "\n" not in message


def test_a_second_supervisor_is_refused(run: RunDirectory) -> None:
    """The error names the pid of the first one and the command that stops it."""
    lock = run.acquire()
    with pytest.raises(RunDirectoryError, match=rf"pid {os.getpid()}\b.*grpo-run stop"):
        run.acquire()
    os.close(lock)


def test_the_owner_is_known_while_it_holds_the_lock(run: RunDirectory) -> None:
    """None afterwards, although the file still exists. A new supervisor can take over from one that was
    killed, also right after somebody has looked.
    """
    assert run.owner() is None
    for _ in range(2):
        lock = run.acquire()
        assert run.owner() == os.getpid()
        os.close(lock)
        assert run.owner() is None
    assert run.lock.exists()
    assert mode(run.lock) == 0o600


def test_a_new_owner_overwrites_the_old_one(run: RunDirectory) -> None:
    """Also one whose name was longer, or a file that names none."""
    run.lock.write_text("x" * 1000)
    lock = run.acquire()
    assert run.supervisor() == own_identity()
    os.close(lock)


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "null"])
def test_a_directory_without_a_valid_run_json_is_refused(run: RunDirectory, content: str | None) -> None:
    """Missing, truncated or not an object: the error is one line."""
    if content is not None:
        run.run_json.write_text(content)
    with pytest.raises(RunDirectoryError, match=str(run.path)) as caught:
        run.read_run()
    assert "\n" not in str(caught.value)


def test_without_a_name_the_active_run_is_meant_or_the_last_that_has_trained(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Else the one that was launched last, not by its name. Several active ones are listed."""
    root = tmp_path / "runs"
    trained, refused = RunDirectory(path=root / "zzz-0"), RunDirectory(path=root / "aaa-0")
    for launched_at, one in enumerate((run, trained, refused)):
        one.create()
        one.write_run({})
        os.utime(one.run_json, (launched_at, launched_at))
    assert find_run(None, root=root) == refused
    Journal(trained.journal, "r").write(event("step_committed", step=3, train_call=1))
    assert find_run(None, root=root) == trained
    with run.locked():
        assert find_run(None, root=root) == run
        with refused.locked(), pytest.raises(RunDirectoryError) as caught:
            find_run(None, root=root)
    assert str(caught.value) == f"2 runs are active; name one of {refused.path}, {run.path}"
    assert find_run(None, root=root) == trained
