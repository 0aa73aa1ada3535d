"""Evidence of real processes contains the user's line, whatever state the process is in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence.collection import Collected, collect
from grpo_run.watchdog.evidence.stacks import main_stack, user_location

READY_SECONDS = 30.0
ARMED = """
import faulthandler, re, signal, sys, time
stacks = open(sys.argv[1], "ab")
faulthandler.register(signal.SIGRTMIN + 11, stacks, all_threads=True)
"""
IGNORING = """
import re, signal, sys, time
signal.signal(signal.SIGRTMIN + 11, signal.SIG_IGN)
"""
BLOCKING = ARMED + "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN + 11})\n"
SLEEP = """
def reward():
    print("ready", flush=True)
    time.sleep(600)
reward()
"""
MATCH = """
def judge():
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 40 + "b")
judge()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int, str], int]]:
    """Start a rank from a script's text, and wait until it is in the function where it stays."""
    started: list[subprocess.Popen[bytes]] = []

    def rank(number: int, text: str) -> int:
        script = tmp_path / f"train{number}.py"
        script.write_text(text)
        stacks = tmp_path / f"rank{number}.stacks"
        stacks.touch()
        child = subprocess.Popen(
            [sys.executable, str(script), str(stacks)], stdout=subprocess.PIPE, start_new_session=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child.pid

    yield rank
    for child in started:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(READY_SECONDS)
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def incident(tmp_path: Path) -> Path:
    """Create the directory of an open incident."""
    folder = tmp_path / "0001-collecting"
    folder.mkdir(mode=0o700)
    return folder


def stack_files(incident: Path, pids: dict[int, int]) -> dict[int, Path]:
    """Return the file that each rank writes its stacks to."""
    return {rank: incident.parent / f"rank{rank}.stacks" for rank in pids}


def functions(found: Collected) -> dict[int, str]:
    """Return the user's function that each rank is in."""
    located = {}
    for rank, stacks in found.stacks.items():
        stack = main_stack(stacks)
        location = user_location(stack) if stack is not None else None
        located[rank] = location.function if location is not None else "?"
    return located


def until(state: str, pid: int) -> None:
    """Wait until a process is in a state."""
    deadline = time.monotonic() + READY_SECONDS
    while processes.read_state(pid) != state:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def computing(pid: int) -> None:
    """Wait until a process has used 0.2 s of CPU, which only the regular expression needs."""

    def used_seconds() -> float:
        thread = processes.read_main_thread(pid)
        return thread.cpu_seconds if thread is not None else 0.0

    begun, deadline = used_seconds(), time.monotonic() + READY_SECONDS
    while used_seconds() < begun + 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_sleeping_and_computing_ranks_write_their_own_stacks(
    start: Callable[[int, str], int], incident: Path
) -> None:
    """The C signal handler writes stacks even while a regular expression holds the GIL."""
    pids = {0: start(0, ARMED + SLEEP), 1: start(1, ARMED + MATCH), 2: start(2, ARMED + SLEEP)}
    found = collect(incident, pids, stack_files(incident, pids))
    assert found.missing == []
    assert functions(found) == {0: "reward", 1: "judge", 2: "reward"}
    assert not list((incident / "stacks").glob("*.native.txt"))
    assert "> judge (" in (incident / "stacks" / "folded.txt").read_text()


def test_a_stopped_rank_yields_its_line(start: Callable[[int, str], int], incident: Path) -> None:
    """The stack of a process in SIGSTOP is read from its memory; the process stays stopped."""
    pids = {0: start(0, ARMED + SLEEP), 1: start(1, ARMED + SLEEP)}
    os.kill(pids[1], signal.SIGSTOP)
    until("T", pids[1])
    found = collect(incident, pids, stack_files(incident, pids))
    assert found.missing == []
    assert functions(found) == {0: "reward", 1: "reward"}
    assert (incident / "stacks" / "rank1.native.txt").stat().st_mode & 0o777 == 0o600
    assert processes.read_state(pids[1]) == "T"


def test_a_stuck_interpreter_shows_the_native_code_it_is_in(
    start: Callable[[int, str], int], incident: Path
) -> None:
    """The native stack shows the code that holds the GIL below the last Python frame.

    The process keeps running.
    """
    pids = {0: start(0, ARMED + MATCH)}
    computing(pids[0])
    found = collect(incident, pids, stack_files(incident, pids), interpreter_stuck={0})
    assert found.missing == []
    assert functions(found) == {0: "judge"}
    native = (incident / "stacks" / "rank0.native.txt").read_text()
    assert "judge (" in native
    assert native.index("sre") < native.index("judge (")
    until("R", pids[0])


@pytest.mark.parametrize(
    "text", [IGNORING, pytest.param(BLOCKING, marks=pytest.mark.full)], ids=["ignores", "blocks"]
)
def test_a_rank_that_ignores_the_signal_yields_its_line(
    start: Callable[[int, str], int], incident: Path, text: str
) -> None:
    """A script that ignores or blocks the stack signal still yields its line."""
    pids = {0: start(0, text + SLEEP)}
    found = collect(incident, pids, stack_files(incident, pids))
    assert found.missing == []
    assert functions(found) == {0: "reward"}
    assert processes.read_state(pids[0]) == "S"


def test_children_of_a_rank_are_listed(start: Callable[[int, str], int], incident: Path) -> None:
    """Processes in the rank's session, such as data loaders, are listed with state and command."""
    pids = {0: start(0, "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\n" + SLEEP)}
    while not (children := processes.read_children(pids[0])):
        time.sleep(0.01)
    (child,) = children
    until("S", child)
    collect(incident, pids, stack_files(incident, pids))
    (line,) = (incident / "proc" / "rank0.children").read_text().splitlines()
    assert line.startswith(f"{child} S ")
    assert "sleep 600" in line
