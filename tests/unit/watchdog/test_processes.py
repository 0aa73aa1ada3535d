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
    assert processes.read_stat(MISSING_PID) is None
    assert processes.read_children(MISSING_PID) == []


def test_the_stat_of_this_process_is_what_the_kernel_says() -> None:
    """Parent, session, CPU time and start time are those of system calls."""
    stat = processes.read_stat(ME)
    assert stat is not None
    assert (stat.pid, stat.parent, stat.session) == (ME, os.getppid(), os.getsid(0))
    used = os.times()
    assert stat.cpu_seconds == pytest.approx(used.user + used.system, abs=0.5)
    assert stat.children_cpu_seconds == pytest.approx(used.children_user + used.children_system, abs=0.5)
    uptime_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert 0 < stat.started_ticks / processes.TICKS_PER_SECOND < uptime_seconds
    assert stat.is_alive


def test_a_name_with_parentheses_does_not_shift_the_fields() -> None:
    """A command may be called `) R 1 (`."""
    file = Path(f"/proc/self/task/{ME}/comm")
    before = file.read_text()
    file.write_text(") Z 1 2 (")
    try:
        stat = processes.read_stat(ME)
        assert stat is not None
        assert (stat.name, stat.state, stat.parent) == (") Z 1 2 (", "R", os.getppid())
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
