"""What /proc tells: of this process, of one that is not there, and of names that are made to confuse."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from grpo_run.watchdog import processes

ME = os.getpid()
NOBODY = 2**22 + 1
"""Above the kernel's largest pid."""


def test_this_process_runs() -> None:
    """Who reads its own state is running, and has used time."""
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.state == processes.read_state(ME) == "R"
    assert 0 < thread.cpu_seconds < 100_000


def test_cpu_seconds_are_the_main_threads() -> None:
    """They agree with what the kernel tells this process about itself."""
    while time.thread_time() < 0.05:
        pass
    told = processes.read_cpu_seconds(ME)
    assert told is not None
    assert told == pytest.approx(time.thread_time(), abs=0.1)


def test_a_process_that_is_gone_is_unknown() -> None:
    """None from every reading, and never a zero."""
    assert processes.read_state(NOBODY) is None
    assert processes.read_cpu_seconds(NOBODY) is None
    assert processes.read_wchan(NOBODY) is None
    assert processes.read_io_bytes(NOBODY) is None
    assert processes.read_session(NOBODY) is None
    assert processes.session_members(NOBODY) == []


def test_the_session_of_this_process_has_it_as_member() -> None:
    """One look around serves several sessions; usage is at least this process's own."""
    session = os.getsid(0)
    found = processes.members_by_session([session, NOBODY])
    assert ME in found[session]
    assert found[NOBODY] == []
    usage = processes.read_session(session)
    own = processes.read_cpu_seconds(ME)
    assert usage is not None
    assert own is not None
    assert ME in usage.members
    assert usage.cpu_seconds >= own
    assert usage.io_bytes is None or usage.io_bytes > 0


def test_io_that_may_not_be_read_makes_the_sum_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a sum would look like the whole."""
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
    """Refusal is no exception."""

    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert processes.read_wchan(ME) is None
    assert processes.read_io_bytes(ME) is None
    assert processes.read_state(ME) is None
