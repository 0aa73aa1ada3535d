"""Terminating processes: real ones, which exit at once, late or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from grpo_run.runtime.processes import termination
from grpo_run.runtime.processes.termination import TerminatedProcess, describe, send, terminate
from grpo_run.watchdog.processes import ProcessStat, read_stat

Start = Callable[..., subprocess.Popen[str]]

READY = "print('ready', flush=True)\n"
IGNORES = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)"
HANDLES = (
    "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    + READY
    + "time.sleep(600)"
)
RESPAWNS = """
import signal, subprocess, sys, time
def again(*_):
    subprocess.Popen(["sleep", "600"])
    sys.exit(0)
signal.signal(signal.SIGTERM, again)
print('ready', flush=True)
time.sleep(600)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python programs, each in a session of its own; kill the sessions afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, title: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [title or sys.executable, "-S", "-c", program], executable=sys.executable, stdout=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def alive(*processes: subprocess.Popen[str]) -> Callable[[], Mapping[int, ProcessStat]]:
    """A function that finds those of these processes, and of their sessions, that are alive."""
    sessions = {process.pid for process in processes}

    def find() -> dict[int, ProcessStat]:
        stats = [read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
        return {
            stat.pid: stat
            for stat in stats
            if stat is not None and stat.is_alive and stat.session in sessions
        }

    return find


def test_sigterm_comes_first_and_sigkill_after_the_wait(start: Start) -> None:
    """A process that handles SIGTERM is not killed, not even if it was stopped."""
    handles, ignores = start(HANDLES), start(IGNORES)
    os.kill(handles.pid, signal.SIGSTOP)
    ended = {one.pid: one for one in terminate(alive(handles, ignores), sessions=(), term_seconds=1.0)}
    assert (handles.wait(), ignores.wait()) == (7, -signal.SIGKILL)
    assert not ended[handles.pid].killed
    assert ended[ignores.pid].killed
    assert not any(one.remains for one in ended.values())


def test_what_is_started_meanwhile_is_terminated_too(start: Start) -> None:
    """A server may be started again by the program that watches it."""
    respawns = start(RESPAWNS)
    ended = terminate(alive(respawns), sessions=())
    assert len(ended) == 2
    assert alive(respawns)() == {}


def test_a_fork_of_a_rank_that_ignores_sigterm_does_not_delay_a_recovery(start: Start) -> None:
    """It ends with its rank. One that has left the session gets the whole time."""
    fork = start(IGNORES, "grpo-run rank 0/2: train.py")
    began = time.monotonic()
    (ended,) = terminate(alive(fork), sessions=[fork.pid], term_seconds=60.0)
    assert ended.killed
    assert ended.part_of_rank
    assert time.monotonic() - began < 30.0
    assert describe([ended]) == ""


def test_the_resource_tracker_is_left_to_remove_shared_memory(start: Start) -> None:
    """It is not signaled within the wait, and exits by itself once nobody needs it."""
    tracker = start(
        "import time\n" + READY + "time.sleep(0.5)", "python -c multiprocessing.resource_tracker main"
    )
    assert terminate(alive(tracker), sessions=(), term_seconds=20.0) == []
    assert tracker.wait() == 0


def test_the_resource_tracker_outlives_what_needs_sigkill(start: Start) -> None:
    """It removes shared memory after the last process that used it has exited."""
    ignores = start(IGNORES)
    tracker = start(
        "import os, sys, time\n"
        + READY
        + f"while os.path.exists('/proc/{ignores.pid}/exe'): time.sleep(0.01)\n"
        "time.sleep(0.3)",
        "python -c multiprocessing.resource_tracker main",
    )
    ended = terminate(alive(ignores, tracker), sessions=(), term_seconds=0.3)
    assert [(one.pid, one.killed) for one in ended] == [(ignores.pid, True)]
    assert tracker.wait() == 0


def test_a_service_that_is_just_exiting_is_not_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has released its command line already, by which it is recognized."""
    tracker = start(READY + "import time; time.sleep(0.5)", "python -c multiprocessing.resource_tracker main")
    reads = iter([termination.read_arguments(tracker.pid)])
    monkeypatch.setattr(termination, "read_arguments", lambda pid: next(reads, ""))
    assert terminate(alive(tracker), sessions=(), term_seconds=0.1) == []
    assert tracker.wait() == 0


def test_another_process_with_the_same_pid_is_not_signaled(start: Start) -> None:
    """The start time identifies a process."""
    process = start(HANDLES)
    stat = read_stat(process.pid)
    assert stat is not None
    assert send(replace(stat, started_ticks=stat.started_ticks - 1), signal.SIGKILL)
    assert process.poll() is None
    assert send(stat, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert send(stat, signal.SIGKILL)  # gone


def test_a_process_that_cannot_be_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is bounded. One that may not be signaled, as after setuid, is not waited for at all."""
    monkeypatch.setattr(termination, "KILL_SECONDS", 0.3)
    monkeypatch.setattr(termination, "send", lambda process, number: process.pid == os.getpid())
    own = read_stat(os.getpid())
    assert own is not None
    (left,) = terminate(lambda: {own.pid: own}, sessions=(), term_seconds=0.0)
    assert left.remains
    other = replace(own, pid=1)
    (refused,) = terminate(lambda: {1: other}, sessions=(), term_seconds=60.0)
    assert refused.remains


def test_what_was_terminated_is_said_in_one_line() -> None:
    """Long command lines are cut, and of many processes the first are named."""
    many = [TerminatedProcess(pid=pid, name="sleep", arguments="sleep " + "9" * 200) for pid in range(10, 18)]
    text = describe([*many, TerminatedProcess(pid=9, name="zfs", arguments="", killed=True, remains=True)])
    assert text.startswith("ended 8 processes that the ranks had started: 10 (sleep 999")
    assert ", 3 more; could not end 9 (zfs)" in text
    assert "\n" not in text
    assert describe([]) == ""
    killed = TerminatedProcess(pid=4, name="sh", arguments="sh x", killed=True)
    assert describe([killed]) == "ended 1 process that the ranks had started: 4 (sh x); 1 needed SIGKILL"
