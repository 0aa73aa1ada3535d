"""The end of a run with a helper that SIGKILL does not end, as one that sleeps in the kernel on a disk that
hangs.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from grpo_run.runtime.processes import helpers
from grpo_run.runtime.processes.helpers import Helpers
from grpo_run.runtime.processes.termination import TerminatedProcess
from grpo_run.watchdog.processes import ProcessStat, read_environment
from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

TOKEN = f"t0ken-{os.getpid()}"
"""No other tests on this machine use it."""


@dataclass
class Killer:
    """In the place of `terminate`: nothing that is found is ended. Records what was found, by call."""

    killed: bool = True
    calls: list[set[int]] = field(default_factory=list)

    def __call__(
        self, find: Callable[[], Mapping[int, ProcessStat]], *, sessions: object
    ) -> list[TerminatedProcess]:
        found = find()
        self.calls.append(set(found))
        return [
            TerminatedProcess(pid=pid, name=one.name, arguments="", killed=self.killed, remains=True)
            for pid, one in found.items()
        ]


@pytest.fixture
def helper() -> Iterator[int]:
    """A helper of a rank that has exited, known by the run's token."""
    process = subprocess.Popen(["sleep", "600"], env={TOKEN_VARIABLE: TOKEN}, start_new_session=True)
    while not read_environment(process.pid):
        time.sleep(0.001)  # Popen returns before the kernel has finished exec
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def reported() -> list[int]:
    """Pids of the processes that were reported, in order."""
    return []


@pytest.fixture
def made(reported: list[int]) -> Helpers:
    """The helpers of this process, which no user interrupts."""
    owned = RunProcesses(os.getpid(), os.getsid(0), tokens=[TOKEN])
    return Helpers(
        owned, RemainingProcesses(owned), keep=(),
        settings=DeadlineSettings(exit_seconds=1.0, exit_connected_seconds=1.0),
        announce_ranks=lambda pids: None, notify=lambda text: None,
        report=lambda terminated: reported.extend(one.pid for one in terminated), interrupted=lambda: False,
    )  # fmt: skip


def test_a_helper_that_survives_sigkill_is_reported_once_and_not_waited_for(
    made: Helpers, helper: int, reported: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later attempt and the end of the run go on at once."""
    killer = Killer()
    monkeypatch.setattr(helpers, "terminate", killer)
    made.terminate()
    made.terminate()
    assert killer.calls == [{helper}, set()]
    assert reported == [helper]
    began = time.monotonic()
    made.wait()
    assert time.monotonic() - began < 30.0  # it is never gone


def test_a_helper_that_could_not_be_killed_is_tried_again(
    made: Helpers, helper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that may not be signaled works on, and is waited for at the end."""
    killer = Killer(killed=False)
    monkeypatch.setattr(helpers, "terminate", killer)
    made.terminate()
    made.terminate()
    assert killer.calls == [{helper}, {helper}]
    began = time.monotonic()
    made.wait()
    assert time.monotonic() - began >= 1.0


@pytest.mark.usefixtures("helper")
def test_a_job_that_is_suspended_does_not_end_its_helpers(
    made: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload was stopped as well, and has its time afterwards."""
    now, jumps = [1000.0], [0.5, 300.0, 0.5, 300.0]
    monkeypatch.setattr(helpers, "time", SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]}))

    def pass_time(left: object, seconds: float) -> None:
        now[0] += jumps.pop(0) if jumps else 0.25

    monkeypatch.setattr(helpers, "wait_for_exits", pass_time)
    made.wait()
    assert not jumps
    assert 602.0 <= now[0] - 1000.0 < 604.0
