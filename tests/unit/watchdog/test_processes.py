"""Process facts from /proc: this process, missing processes, and unusual names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from grpo_run.watchdog import processes

ME = os.getpid()
MISSING_PID = 2**22 + 1
"""Above the kernel's largest pid."""


def test_this_process_is_running() -> None:
    """It has used CPU time."""
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.state == processes.read_state(ME) == "R"
    assert 0 < thread.cpu_seconds < 100_000


def test_cpu_seconds_are_the_main_threads() -> None:
    """They agree with the kernel's thread clock."""
    while time.thread_time() < 0.05:
        pass
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.cpu_seconds == pytest.approx(time.thread_time(), abs=0.1)


def test_a_process_that_is_gone_is_unknown() -> None:
    """Every reading is None, never zero."""
    assert processes.read_state(MISSING_PID) is None
    assert processes.read_main_thread(MISSING_PID) is None
    assert processes.read_wchan(MISSING_PID) is None
    assert processes.read_io_bytes(MISSING_PID) is None
    assert processes.read_session(MISSING_PID) is None
    assert processes.session_members(MISSING_PID) == []


def test_this_process_is_a_member_of_its_session() -> None:
    """One scan serves several sessions; the usage is at least this process's own."""
    session = os.getsid(0)
    found = processes.members_by_session([session, MISSING_PID])
    assert ME in found[session]
    assert found[MISSING_PID] == []
    usage = processes.read_session(session)
    own = processes.read_main_thread(ME)
    assert usage is not None
    assert own is not None
    assert ME in usage.members
    assert usage.cpu_seconds >= own.cpu_seconds
    assert usage.io_bytes is None or usage.io_bytes > 0


def test_io_that_may_not_be_read_makes_the_sum_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial sum would look complete."""
    monkeypatch.setattr(processes, "read_io_bytes", lambda pid: None if pid == ME else 5)
    usage = processes.read_session(os.getsid(0))
    assert usage is not None
    assert usage.io_bytes is None


def test_a_name_with_parentheses_does_not_shift_the_fields() -> None:
    """A command may be called `) R 1 (`."""
    file = Path(f"/proc/self/task/{ME}/comm")
    before = file.read_text()
    file.write_text(") Z 1 2 (")
    try:
        assert processes.read_state(ME) == "R"
        assert ME in processes.session_members(os.getsid(0))
    finally:
        file.write_text(before.strip())


def test_a_file_that_may_not_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused access raises no exception."""

    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert processes.read_wchan(ME) is None
    assert processes.read_io_bytes(ME) is None
    assert processes.read_state(ME) is None
