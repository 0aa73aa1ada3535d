"""What an earlier supervisor has left is ended if that supervisor is dead, with real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.runtime.supervisor.previous_supervisor import SupervisorIdentity, end_previous, own_identity
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE

EARLIER = f"earlier-{os.getpid()}"
"""A token that no other tests on this machine use: what has it is ended."""


@pytest.fixture
def helper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the token of an earlier supervisor."""
    process = subprocess.Popen(["sleep", "600"], env={TOKEN_VARIABLE: EARLIER}, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def dead() -> SupervisorIdentity:
    """A supervisor that has exited: its pid is in use by this process, which was started later."""
    own = own_identity(EARLIER)
    return replace(own, started_ticks=own.started_ticks - 1)


def test_what_a_dead_supervisor_left_is_ended_once(tmp_path: Path, helper: subprocess.Popen[bytes]) -> None:
    """The file then names the new supervisor."""
    file = tmp_path / "processes.json"
    assert end_previous(file, dead(), ()) == []
    assert helper.poll() is None
    (ended,) = end_previous(file, own_identity("now"), ())
    assert ended.pid == helper.pid
    assert helper.wait(20) != 0
    assert end_previous(file, own_identity("now"), ()) == []
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("alive", [True, False], ids=["the supervisor is alive", "on another machine"])
def test_a_copy_of_a_live_runs_directory_touches_nothing(
    alive: bool, tmp_path: Path, helper: subprocess.Popen[bytes]
) -> None:
    """Its lock is free, but the file names the supervisor of the original."""
    file = tmp_path / "processes.json"
    end_previous(file, own_identity(EARLIER) if alive else replace(dead(), namespace="elsewhere"), ())
    assert end_previous(file, own_identity("now"), ()) == []
    assert helper.poll() is None


def test_what_is_kept_is_left(tmp_path: Path, helper: subprocess.Popen[bytes]) -> None:
    """As at the end of a run."""
    file = tmp_path / "processes.json"
    end_previous(file, dead(), ())
    assert end_previous(file, own_identity("now"), ("sleep",)) == []
    assert helper.poll() is None


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    """It proves nothing."""
    file = tmp_path / "processes.json"
    file.write_text('{"pid": "x"')
    assert end_previous(file, own_identity("now"), ()) == []
    assert str(os.getpid()) in file.read_text()
