"""Reading a run directory that belongs to somebody else, or to nobody any more."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.journal import event
from support.syscalls import MARK, Stop, run_and_kill, unsupported

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import RunReader, read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.identity import own_identity


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Of a run that has committed step 1 of 9."""
    directory = RunDirectory(path=tmp_path / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    journal = Journal(directory.journal, "night")
    journal.write(event("run_started"))
    journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=9))
    journal.write(event("step_committed", step=1, train_call=1))
    return journal


@pytest.fixture
def run(tmp_path: Path, journal: Journal) -> RunDirectory:
    """The directory of that run."""
    return RunDirectory(path=tmp_path / "night")


def test_a_second_look_reads_only_what_was_added(
    run: RunDirectory, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And has what a reader has that begins now. Half a line is read once its end is there."""
    reader = RunReader(run)
    assert reader.read().history.step == 1
    applied = []
    apply = History.apply
    monkeypatch.setattr(History, "apply", lambda self, record: (applied.append(record), apply(self, record)))
    line = journal.entry(event("step_committed", step=2, train_call=1)).line
    for part, step in ((line[:20], 1), (line[20:] + b"\n", 2)):
        with run.journal.open("ab") as file:
            file.write(part)
        assert reader.read().history.step == step
    assert [one.step for one in applied] == [2]
    assert reader.history() == History.of(read_journal(run.journal))


@pytest.mark.parametrize("way", ["truncated", "replaced", "removed"])
def test_a_journal_that_is_not_the_one_before_is_read_from_its_beginning(
    run: RunDirectory, journal: Journal, way: str
) -> None:
    """A run directory may be put back from a copy while somebody looks."""
    reader = RunReader(run)
    journal.write(event("warning", text="x"))
    assert reader.read().history.warnings == 1
    lines = run.journal.read_bytes().splitlines(keepends=True)
    if way == "truncated":
        os.truncate(run.journal, len(lines[0]) + len(lines[1]))
    else:
        run.journal.unlink()
        if way == "replaced":
            run.journal.write_bytes(b"".join(lines[:2]) + lines[3] * 20)
    assert reader.history() == History.of(read_journal(run.journal))
    assert reader.history().warnings == (20 if way == "replaced" else 0)


@pytest.mark.skipif(unsupported() is not None, reason=unsupported() or "")
def test_looking_changes_no_file_and_takes_no_lock(run: RunDirectory) -> None:
    """Also of a live run."""
    Board.create(run.board, 1).writer(0, rank=0, pid=os.getpid(), attempt=1)
    lock = run.acquire()
    trace = run_and_kill(lambda: RunReader(run).read(), Stop(number=10**6, mode="before"), below=(run.path,))
    os.close(lock)
    assert [call for call in trace.calls if call != MARK] == []


def test_a_new_supervisor_does_not_wait_for_who_looks(run: RunDirectory) -> None:
    """It takes the lock at the first try, while another process has just looked and still has it open."""
    with run.lock.open("a+b") as file:
        assert run.supervisor() is None
        lock = run.acquire()
        assert run.supervisor() == own_identity()
        assert file.readable()
        os.close(lock)
    assert run.supervisor() is None


def test_a_copy_of_a_live_run_is_not_live(run: RunDirectory, tmp_path: Path) -> None:
    """Its lock file names a supervisor that lives, and its board shows ranks as they once were. A copy may be
    read-only.
    """
    Board.create(run.board, 1).writer(0, rank=0, pid=os.getpid(), attempt=1)
    lock = run.acquire()
    shutil.copytree(run.path, tmp_path / "copy")
    for path in (tmp_path / "copy", *(tmp_path / "copy").rglob("*")):
        path.chmod(0o500 if path.is_dir() else 0o400)
    status = RunReader(RunDirectory(path=tmp_path / "copy")).read()
    assert (status.state, status.supervisor_pid, status.slots) == ("unknown", None, ())
    assert status.history.step == 1
    assert RunReader(run).read().supervisor_pid == os.getpid()
    os.close(lock)


def test_a_supervisor_on_another_machine_is_said_to_be_there(run: RunDirectory) -> None:
    """Its lock is seen on a shared file system; its ranks are not shown as idle."""
    Board.create(run.board, 1).writer(0, rank=0, pid=os.getpid(), attempt=1)
    lock = run.acquire()
    there = replace(own_identity(), namespace="another-boot pid:[4026531836]", host="node07")
    os.pwrite(lock, f"{json.dumps(vars(there))}\n".encode().ljust(512), 0)
    status = RunReader(run).read()
    assert (status.slots, status.supervisor_pid) == ((), os.getpid())
    assert status.state != "unknown"
    assert "supervisor is on another machine (node07)" in status.sentence
    os.close(lock)


def test_a_journal_that_cannot_be_read_is_an_error(run: RunDirectory) -> None:
    """Such as one of another user: it must not look like that of a run that has done nothing."""
    run.journal.unlink()
    assert RunReader(run).read().history.step == 0
    run.journal.mkdir()
    with pytest.raises(RunDirectoryError, match="cannot be read"):
        RunReader(run).read()


def test_a_lock_of_another_process_is_seen(run: RunDirectory) -> None:
    """And is gone with the process, however it ends."""
    code = (
        "import pathlib, sys; from grpo_run.runtime.history.run_directory import RunDirectory;"
        f"RunDirectory(path=pathlib.Path({str(run.path)!r})).acquire(); print('', flush=True);"
        "sys.stdin.read()"
    )
    owner = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=-1, stdout=-1)
    assert owner.stdout is not None
    owner.stdout.readline()
    found = run.supervisor()
    assert found is not None
    assert found.pid == owner.pid
    owner.kill()
    owner.communicate()
    assert run.supervisor() is None
