"""Activity of ranks: what counts as progress in which phase."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.processes import usage as process_usage
from grpo_run.runtime.processes.usage import TreeUsage
from grpo_run.runtime.supervisor.detection._activity import BUSY_FRACTION, RankActivity
from grpo_run.watchdog import processes
from grpo_run.watchdog.observation import SESSION_PHASES, OpenPhase, Phase, Slot
from grpo_run.watchdog.processes import MainThread
from grpo_run.watchdog.run_processes import connections
from grpo_run.watchdog.run_processes.connections import Connections
from grpo_run.watchdog.stalls.observed import ProcessFacts
from grpo_run.watchdog.stalls.process_clocks import ThreadReading

PID = 900
WORK = sorted(set(Phase) - SESSION_PHASES)


class Session:
    """The /proc readings of one rank; changed by the test."""

    def __init__(self) -> None:
        self.thread: MainThread | None = MainThread(state="S", cpu_seconds=1.0)
        self.cpu_seconds = 10.0
        self.io_bytes = 1000
        self.readable = True
        self.threads: dict[int, ThreadReading] | None = {PID: ThreadReading("S", 1.0, "python")}
        self.connections: Connections | None = Connections(outside="", traffic_bytes=0)

    def usage(self, members: object) -> TreeUsage | None:
        """Return the usage of the process tree."""
        assert members == [PID, PID + 1]
        if not self.readable:
            return None
        return TreeUsage(
            members=frozenset({PID, PID + 1}), cpu_seconds=self.cpu_seconds, io_bytes=self.io_bytes
        )


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A rank whose process sleeps."""
    told = Session()
    monkeypatch.setattr(processes, "read_main_thread", lambda pid: told.thread)
    monkeypatch.setattr(
        process_usage, "find_process_trees", lambda pids: {pid: [pid, pid + 1] for pid in pids}
    )
    monkeypatch.setattr(process_usage, "read_tree_usage", told.usage)
    monkeypatch.setattr(process_usage, "read_threads", lambda members: told.threads)
    monkeypatch.setattr(
        connections, "read_connections", lambda members, supervisor: dict.fromkeys(members, told.connections)
    )
    return told


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    """A slot that was written once."""
    board = Board.create(tmp_path / "board.mmap", 1)
    board.writer(0, rank=0, pid=PID, attempt=0).publish()
    read = board.read(0)
    assert read is not None
    return read


def look(
    activity: RankActivity, rank: int, slot: Slot | None, pid: int | None, now: float
) -> ProcessFacts | None:
    """Scan one rank and return its facts."""
    if slot is not None:
        slot = replace(slot, rank=rank)
    return activity.scan({rank: slot}, {} if pid is None else {rank: pid}, {rank: 50.0}, now)[rank]


def within(slot: Slot, *phases: Phase) -> Slot:
    """Return the slot with these open phases, outermost first."""
    return replace(slot, phases=tuple(OpenPhase(phase=phase, since_seconds=1.0) for phase in phases))


def test_a_rank_without_activity_was_never_active(session: Session, slot: Slot) -> None:
    """The first scan has nothing to compare with, and a missing slot says nothing."""
    activity = RankActivity(60.0, 0.0)
    activity.record({0: slot, 1: None}, 100.0)
    look(activity, 0, within(slot, Phase.data), PID, 100.0)
    assert (activity.active_at(0), activity.active_at(1), activity.active_at(7)) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_collective_is_progress_in_every_phase(slot: Slot, phase: Phase) -> None:
    """For the rank that issued it, at the time of the scan; the same number again is no progress."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, phase)
    activity.record({0: replace(here, collectives_issued=5), 1: here}, 100.0)
    activity.record({0: replace(here, collectives_issued=5), 1: here}, 110.0)
    assert (activity.active_at(0), activity.active_at(1)) == (100.0, 0.0)
    activity.record({0: replace(here, collectives_issued=6)}, 120.0)
    assert activity.active_at(0) == 120.0


@pytest.mark.parametrize("what", ["cpu", "io"])
@pytest.mark.parametrize("phase", [None, *sorted(SESSION_PHASES)])
def test_a_working_session_is_active_in_a_session_phase(
    session: Session, slot: Slot, phase: Phase | None, what: str
) -> None:
    """Also before the first phase; a child's work counts, because sums are over the session."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, phase) if phase is not None else within(slot)
    look(activity, 0, here, PID, 100.0)
    if what == "cpu":
        session.cpu_seconds += 1.0
    else:
        session.io_bytes = 1000 + 64 * 1024
    look(activity, 0, here, PID, 110.0)
    look(activity, 0, here, PID, 120.0)
    expected = (110.0, 0.0) if what == "cpu" else (0.0, 110.0)
    assert (activity.computing_at(0), activity.active_at(0)) == expected


@pytest.mark.parametrize("phase", WORK)
def test_only_computing_counts_in_other_phases(session: Session, slot: Slot, phase: Phase) -> None:
    """What is read or written there is not the phase's work; the innermost phase decides."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.data, phase)
    look(activity, 0, here, PID, 100.0)
    session.cpu_seconds += 100.0
    session.io_bytes = 10**9
    look(activity, 0, here, PID, 110.0)
    assert (activity.active_at(0), activity.computing_at(0)) == (0.0, 110.0)
    assert activity.is_busy(0, 110.0)


def test_a_session_phase_inside_another_phase_counts(session: Session, slot: Slot) -> None:
    """For example a user's callback in the middle of a step."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.forward_backward, Phase.callback)
    look(activity, 0, here, PID, 100.0)
    session.cpu_seconds += 5.0
    look(activity, 0, here, PID, 110.0)
    assert activity.computing_at(0) == 110.0


def test_the_heartbeat_of_an_idle_interpreter_is_no_activity(session: Session, slot: Slot) -> None:
    """A hung rank uses 0.1 % of a core."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.data)
    for number in range(20):
        session.cpu_seconds += 0.01
        look(activity, 0, here, PID, 100.0 + 10.0 * number)
    assert activity.computing_at(0) == 0.0
    session.cpu_seconds += 10.0 * BUSY_FRACTION * 1.5
    look(activity, 0, here, PID, 300.0)
    assert activity.computing_at(0) == 300.0


def test_without_a_slot_work_is_no_activity(session: Session) -> None:
    """The phase is unknown."""
    activity = RankActivity(60.0, 0.0)
    look(activity, 0, None, PID, 100.0)
    session.cpu_seconds += 100.0
    assert look(activity, 0, None, PID, 110.0) is not None
    assert activity.active_at(0) == 0.0


def test_ranks_are_compared_with_themselves_only(session: Session, slot: Slot) -> None:
    """A rank that is first scanned later is not compared with another rank's past."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.data)
    look(activity, 0, here, PID, 100.0)
    session.cpu_seconds += 100.0
    look(activity, 1, here, PID, 110.0)
    assert (activity.computing_at(0), activity.computing_at(1)) == (0.0, 0.0)


@pytest.mark.parametrize("gone", ["no process", "main thread", "session"])
def test_a_process_that_cannot_be_read_is_unknown(session: Session, slot: Slot, gone: str) -> None:
    """A failed scan is not compared with the next one."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.data)
    look(activity, 0, here, PID, 100.0)
    if gone == "main thread":
        session.thread = None
    elif gone == "session":
        session.readable = False
    facts = look(activity, 0, here, None if gone == "no process" else PID, 110.0)
    assert (facts is None) is (gone != "session")  # its state is known all the same
    assert activity.active_at(0) == 0.0


def test_facts_are_the_ranks_state_and_the_age_of_its_heartbeat(session: Session, slot: Slot) -> None:
    """Without a heartbeat its age is NaN; a process tree that cannot be read counts as 0 and is never
    quiet.
    """
    activity = RankActivity(60.0, 0.0)
    session.thread = MainThread(state="D", cpu_seconds=1.0)
    facts = look(activity, 0, replace(slot, heartbeat_seconds=97.0), PID, 100.0)
    assert facts is not None
    assert facts.state == "D"
    assert facts.heartbeat_age_seconds == 3.0
    session.readable = False
    for unknown in (replace(slot, heartbeat_seconds=0.0), None):
        facts = look(activity, 0, unknown, PID, 200.0)
        assert facts is not None
        assert math.isnan(facts.heartbeat_age_seconds)
        assert facts.quiet_seconds == 0.0


def quiet_seconds(session: Session, slot: Slot, seconds: float) -> tuple[float, bool | None]:
    """Scan a rank in `reward` every second for this long; return for how long it has done nothing."""
    activity = RankActivity(60.0, 0.0)
    here = within(slot, Phase.reward)
    facts = None
    for second in range(int(seconds) + 1):
        facts = look(activity, 0, here, PID, 1000.0 + second)
    assert facts is not None
    return facts.quiet_seconds, facts.connected


def test_a_process_tree_that_does_nothing_is_quiet_in_every_phase(session: Session, slot: Slot) -> None:
    """As long as its slot has not changed; without connections to outside."""
    assert quiet_seconds(session, slot, 40.0) == (40.0, False)
    assert quiet_seconds(session, slot, 80.0) == (50.0, False), "the slot changed 50 s ago"


@pytest.mark.parametrize("what", ["runnable", "debugger", "unreadable"])
def test_a_process_tree_that_may_work_is_not_quiet(session: Session, slot: Slot, what: str) -> None:
    """A thread that waits for a CPU, a debugger, or threads that may not be read."""
    state = {"runnable": "R", "debugger": "t"}.get(what)
    session.threads = None if state is None else {PID + 1: ThreadReading(state, 1.0, "worker")}
    assert quiet_seconds(session, slot, 60.0)[0] < 20.0


def test_threads_of_torch_that_wake_up_are_no_work(session: Session, slot: Slot) -> None:
    """Gloo polls its sockets a hundred times a second; on a busy machine it often waits for a CPU."""
    session.threads = {PID + 1: ThreadReading("R", 1.0, "gloo_tcp_loop")}
    assert quiet_seconds(session, slot, 40.0)[0] == 40.0


@pytest.mark.parametrize("outside", [True, None])
def test_a_connection_to_outside_is_noted(session: Session, slot: Slot, outside: bool | None) -> None:
    """Where the kernel does not tell, it is unknown."""
    session.connections = Connections(outside="10.0.0.5:8000", traffic_bytes=9) if outside else None
    assert quiet_seconds(session, slot, 40.0) == (40.0, outside)


def test_a_stopped_interpreter_is_frozen_since_its_last_heartbeat(session: Session, slot: Slot) -> None:
    """But not since before the supervisor's own pause."""
    activity = RankActivity(60.0, 0.0)
    session.thread = MainThread(state="T", cpu_seconds=1.0)
    session.threads = {PID: ThreadReading("T", 1.0, "python")}
    here = replace(within(slot, Phase.eval), heartbeat_seconds=90.0)
    facts = look(activity, 0, here, PID, 100.0)
    assert facts is not None
    assert facts.frozen_seconds == 10.0
    activity.restart(101.0)
    facts = look(activity, 0, here, PID, 104.0)
    assert facts is not None
    assert facts.frozen_seconds == 3.0
    session.threads = {PID: ThreadReading("T", 1.0, "python"), PID + 1: ThreadReading("S", 1.0, "python")}
    facts = look(activity, 0, here, PID, 108.0)
    assert facts is not None
    assert facts.frozen_seconds == 0.0, "a thread runs on"
