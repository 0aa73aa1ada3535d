"""Which processes are a run's, with real processes.

A process S takes the place of the supervisor and R that of a rank. S may adopt orphans, as the supervisor
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from grpo_run.watchdog.processes import read_processes
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses

DEADLINE_SECONDS = 20.0
TOKEN = f"t0ken-{os.getpid()}"
"""No other tests on this machine use it."""
SUPERVISOR = """
import ctypes, os, subprocess, sys
if sys.argv[2] == "adopts":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
own = subprocess.Popen(["sleep", "600"])
print(own.pid, flush=True)
rank = subprocess.Popen(
    [sys.executable, "-S", "-c", sys.argv[1]], start_new_session=True, env={**os.environ, "GRPO_RUN_TOKEN": sys.argv[3]}
)
print(rank.pid, flush=True)
rank.wait()
print("rank gone", flush=True)
sys.stdin.read()
"""  # noqa: E501
RANK = """
import os, subprocess, sys, time
def orphan(environment, then):
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(w, str(os.getpid()).encode())
            if then:
                os.execve("/bin/sleep", ["sleep", "600"], environment)  # closes the pipe
            os.close(w)
            time.sleep(600)
            os._exit(0)
        os._exit(0)
    os.wait()
    os.close(w)
    print(open(r).read(), flush=True)
orphan(dict(os.environ), True)   # has the token
orphan({}, True)                 # a program without it
orphan({}, False)                # a fork of the rank, which shows the rank's environment
print(subprocess.Popen(["sleep", "600"], env={}, start_new_session=True).pid, flush=True)
print(subprocess.Popen(["sleep", "600"], env={}).pid, flush=True)
time.sleep(600)
"""
HELPERS = 5


class Family:
    """S, its own child, R and R's helpers: with token, without, fork, child in a session of its own,
    child.
    """

    def __init__(self, mode: str) -> None:
        self.supervisor = subprocess.Popen(
            [sys.executable, "-S", "-c", SUPERVISOR, RANK, mode, TOKEN], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        self.own, self.rank, *self.helpers = (self.line() for _ in range(2 + HELPERS))
        self.processes = RunProcesses(
            self.supervisor.pid, os.getsid(self.supervisor.pid), tokens=[TOKEN],
            adopts_only_ours=mode == "adopts"
        )  # fmt: skip

    def line(self) -> int:
        """Read the next pid."""
        assert self.supervisor.stdout is not None
        return int(self.supervisor.stdout.readline())

    def kill_rank(self) -> None:
        """Kill R; return when it was reaped."""
        os.kill(self.rank, signal.SIGKILL)
        assert self.supervisor.stdout is not None
        assert self.supervisor.stdout.readline() == "rank gone\n"

    def found(self) -> set[int]:
        """The run's processes."""
        return set(self.processes.find(read_processes()))


@pytest.fixture
def start() -> Iterator[Callable[[str], Family]]:
    """Start families; everything is killed after the test."""
    started: list[Family] = []

    def begin(mode: str) -> Family:
        started.append(Family(mode))
        return started[-1]

    yield begin
    for family in started:
        for pid in (*family.helpers, family.rank, family.own, family.supervisor.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        family.supervisor.communicate(timeout=DEADLINE_SECONDS)


def test_what_a_supervisor_that_adopts_orphans_did_not_start_is_the_ranks(
    start: Callable[[str], Family],
) -> None:
    """Before and after the rank's death, whatever left its session, its parents or its environment."""
    family = start("adopts")
    family.processes.begin_attempt([family.rank])
    assert family.found() == {family.rank, *family.helpers}
    family.kill_rank()
    fresh = RunProcesses(
        family.supervisor.pid, os.getsid(family.supervisor.pid), tokens=[], adopts_only_ours=True
    )
    assert set(fresh.find(read_processes())) == set(family.helpers)
    assert family.found() == set(family.helpers)


def test_an_orphan_of_a_companion_is_not_the_ranks(start: Callable[[str], Family]) -> None:
    """A server may start daemons, which the supervisor adopts; they outlive the ranks with it."""
    family = start("adopts")
    family.kill_rank()
    processes = RunProcesses(
        family.supervisor.pid, os.getsid(family.supervisor.pid), companion=TOKEN, adopts_only_ours=True
    )
    with_token, without, fork, session, child = family.helpers
    assert set(processes.find(read_processes())) == {without, session, child}
    assert {with_token, fork}.isdisjoint(processes.find(read_processes()))


def test_without_adoption_the_token_and_memory_prove_ownership(start: Callable[[str], Family]) -> None:
    """A helper with neither is not taken for the run's, not even as a child of the supervisor."""
    family = start("adopts")
    family.processes.adopts_only_ours = False
    with_token, _, fork, session, child = family.helpers
    family.processes.begin_attempt([family.rank])
    assert family.found() == {family.rank, with_token, fork, session, child}
    family.kill_rank()
    assert family.found() == {with_token, fork, session, child}
    forgetful = RunProcesses(family.supervisor.pid, os.getsid(family.supervisor.pid), tokens=[TOKEN])
    assert set(forgetful.find(read_processes())) == {with_token, fork}


def test_after_the_supervisors_death_the_run_is_still_known(start: Callable[[str], Family]) -> None:
    """By what was seen before, and by the token of what was not."""
    family = start("adopts")
    family.processes.begin_attempt([family.rank])
    family.processes.adopts_only_ours = False
    _, without, *_ = family.helpers
    known = family.found()
    family.supervisor.kill()
    family.supervisor.wait()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while family.found() != known and time.monotonic() < deadline:
        time.sleep(0.01)
    assert family.found() == known == {family.rank, *family.helpers} - {without}


def test_what_survives_sigkill_is_found_once(start: Callable[[str], Family]) -> None:
    """It is not found again, whatever proves that it is the run's; what it has started is, and all others."""
    family = start("adopts")
    family.processes.begin_attempt([family.rank])
    assert family.found() == {family.rank, *family.helpers}
    stuck = {family.rank, family.helpers[0], family.helpers[1]}
    family.processes.give_up(stuck)
    assert family.found() == set(family.helpers) - stuck
    family.processes.begin_attempt([family.rank])
    assert family.found() == set(family.helpers) - stuck


def test_strangers_are_never_the_runs(start: Callable[[str], Family]) -> None:
    """Another run's rank, a process with another token, and children of the supervisor in its own session."""
    family, other = start("adopts"), start("adopts")
    family.processes.begin_attempt([family.rank])
    stranger = subprocess.Popen(
        ["sleep", "600"], env={TOKEN_VARIABLE: f"{TOKEN}2", "OTHER": TOKEN}, start_new_session=True
    )
    try:
        other_tokens = RunProcesses(
            other.supervisor.pid, os.getsid(other.supervisor.pid), tokens=["an0ther"], adopts_only_ours=True
        )
        assert not set(other_tokens.find(read_processes())) & {family.rank, *family.helpers, stranger.pid}
        assert not family.found() & {stranger.pid, family.own, family.supervisor.pid, os.getpid()}
    finally:
        stranger.kill()
        stranger.wait()


def test_a_pid_that_is_in_use_again_is_not_the_rank() -> None:
    """A process is known by its pid and the time at which it was started."""
    leader = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        processes = RunProcesses(os.getpid(), os.getsid(0))
        processes.begin_attempt([leader.pid])
        table = read_processes()
        assert set(processes.find(table)) == {leader.pid}
        processes._ranks = {leader.pid: (leader.pid, table[leader.pid].started_ticks - 1)}
        processes._known = set(processes._ranks.values())
        assert processes.find(table) == {}
    finally:
        leader.kill()
        leader.wait()
