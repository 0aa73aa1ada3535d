"""What the supervisor reports of the hang detector: suspicions, warnings and phase durations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.journal import read_records

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent, RunState
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.supervisor import hang_monitor
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.runtime.supervisor.hang_monitor import HangMonitor
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import OpenPhase, Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations


class Scene:
    """A monitor with a fake detector, in a run that has committed a step."""

    def __init__(self, path: Path) -> None:
        self.journal = path
        self.messages: list[str] = []
        live = LiveHistory(path, "run-1")
        durations = {Phase.reward: Durations.of([1.0, 2.0])}
        self.detector: Any = SimpleNamespace(
            scan=lambda slots: None,
            begin_attempt=lambda *arguments: None,
            settings=DeadlineSettings(),
            blind={},
            suspicion=None,
            awaited=None,
            phase_durations=SimpleNamespace(
                merged=lambda: durations, by_rank=dict, record_end=lambda *arguments: None
            ),
        )
        self.lifecycle = Lifecycle(lambda old, event, new: None)
        self.lifecycle.fire(RunEvent.step_committed)
        self.reporter = Reporter(live, "runs/run-1", self.messages.append)
        self.monitor = HangMonitor(
            cast(HangDetector, self.detector),
            lifecycle=self.lifecycle,
            reporter=self.reporter,
            history=live.history,
        )

    def begin_attempt(self) -> None:
        """One rank is watched."""
        attempt: Any = SimpleNamespace(local_rank_of={0: 0}, sockets={}, world_size=1)
        self.monitor.begin_attempt(attempt, Board.create(self.journal.with_name("b"), 1), {})

    def poll(self, suspicion: str | None) -> RunState:
        """Poll once while the detector suspects something; return the state of the run."""
        self.detector.suspicion = suspicion
        self.monitor.poll({})
        return self.lifecycle.state

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the journal."""
        return [record for record in read_records(self.journal) if record["event"] == name]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A run without suspicions."""
    return Scene(tmp_path / "journal.jsonl")


def test_a_suspicion_changes_the_state_until_it_is_cleared(scene: Scene) -> None:
    """The run is suspect in between."""
    states = [scene.poll(text) for text in (None, "Rank 1 hangs.", "Rank 1 hangs.", None)]
    assert states == [RunState.running, RunState.suspect, RunState.suspect, RunState.running]


def test_a_suspicion_is_written_again_only_if_more_than_its_seconds_changes(scene: Scene) -> None:
    """Every poll repeats it, and the check that confirms it comes a moment later."""
    for text in (
        "Rank 1 has waited 1,060.1 s.",
        "Rank 1 has waited 1,060.2 s.",
        "Ranks 0, 1 hang.",
        "Ranks 0, 1 hang.",
        None,
        "Ranks 0, 1 hang.",
    ):
        scene.poll(text)
    assert [record["sentence"] for record in scene.events("suspicion")] == [
        "Rank 1 has waited 1,060.1 s.", "Ranks 0, 1 hang.", "Ranks 0, 1 hang.",
    ]  # fmt: skip


def test_a_suspicion_while_stopping_does_not_change_the_state(scene: Scene) -> None:
    """The ranks are still expected to stop."""
    scene.lifecycle.fire(RunEvent.stop_requested)
    assert scene.poll("Rank 1 hangs.") is RunState.stopping
    assert len(scene.events("suspicion")) == 1


def test_phase_durations_are_written_periodically(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every poll: the journal would grow by ten lines per second."""
    scene.poll(None)
    assert scene.events("phase_learned") == []
    monkeypatch.setattr(hang_monitor, "PHASE_DURATIONS_EVERY_SECONDS", -1.0)
    scene.poll(None)
    (record,) = scene.events("phase_learned")
    assert record["phase"] == "reward"
    assert Durations.from_json(record["durations"]) == Durations.of([1.0, 2.0])


def test_a_blind_spot_is_reported_once_per_rank_and_reason(scene: Scene) -> None:
    """Every poll finds the same one. The ranks of a new attempt are other processes."""
    for blind in ({1: "refused"}, {1: "refused"}, {}, {1: "refused"}, {0: "no answer", 1: "refused"}):
        scene.detector.blind = blind
        scene.poll(None)
    scene.reporter.begin_attempt()
    scene.poll(None)
    assert [record["rank"] for record in scene.events("warning")] == [1, 0, 0, 1]
    assert scene.messages[0] == (
        "the watchdog cannot see all of rank 1: refused; unobserved state is unknown, not healthy"
    )
    assert len(scene.messages) == 4


def test_a_slow_step_is_no_fault_and_one_without_an_end_is_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, make_slot: Any
) -> None:
    """By the supervisor's own clock."""
    now = 1000.0
    monkeypatch.setattr(hang_monitor.time, "monotonic", lambda: now)
    scene.begin_attempt()
    phases = (OpenPhase(phase=Phase.forward_backward, since_seconds=now),)

    def poll(*, works: bool) -> HangFinding | None:
        nonlocal now
        now += 1.0
        worked = now if works else 1700.0
        return scene.monitor.poll({0: make_slot(0, phases=phases, voted_step=0, last_work_seconds=worked)})

    assert all(poll(works=True) is None for _ in range(700))
    found = None
    while found is None:
        found = poll(works=False)
        assert now < 6000.0
    assert found.stall is not None
    assert found.stall.cause is Cause.no_progress
    assert now == pytest.approx(1700 + DeadlineSettings().startup_seconds, abs=5)


def test_a_wait_of_which_nothing_is_known_is_told_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a known one would have been ended: who waits for whom, since when and until when."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(hang_monitor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    scene.detector.awaited = AwaitedRank(
        rank=1, phase=Phase.reward, since_seconds=1000.0, deadline_at_seconds=2800.0, busy=False,
        waiters=(0,), outside="10.0.0.5:8000", unknown_wait=True,
    )  # fmt: skip
    for clock.now in (1299.0, 1301.0, 1400.0):
        scene.poll(None)
    (message,) = scene.messages
    assert message.startswith("rank 1 has waited 301 s for 10.0.0.5:8000 in reward; the usual")
    assert message.endswith("ended only after 1800 s (--deadline-first, --deadline-ceiling)")
    scene.reporter.begin_attempt()
    scene.detector.awaited = replace(scene.detector.awaited, unknown_wait=False)
    scene.poll(None)
    assert len(scene.messages) == 1


def test_a_rank_that_goes_on_for_far_longer_than_ever_is_told_of_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is, what is usual, who waits and when it ends; again in the next generation."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(hang_monitor, "time", SimpleNamespace(monotonic=lambda: clock.now))
    learned = SimpleNamespace(durations={Phase.generate: Durations.of([3.0, 1.0, 2.0])})
    scene.detector.phase_durations.current = lambda now: learned
    awaited = AwaitedRank(
        rank=1, phase=Phase.generate, since_seconds=1000.0, deadline_at_seconds=1300.0, busy=True,
        waiters=(0, 2), unusual=True, place="train.py:7 in main",
    )  # fmt: skip
    for since, at, limit in ((1000.0, 1090.0, 1300.0), (1000.0, 1095.0, 1300.0), (2000.0, 2095.0, math.inf)):
        clock.now = at
        scene.detector.awaited = replace(awaited, since_seconds=since, deadline_at_seconds=limit)
        scene.poll(None)
    usual = (
        "s and goes on, at train.py:7 in main; the longest of 3 before took 3 s; ranks 0 and 2 wait for it"
    )
    assert scene.messages == [
        f"rank 1 has been in generate for 90 {usual}; if it goes on, it is ended after 5 min",
        f"rank 1 has been in generate for 95 {usual}",
    ]
