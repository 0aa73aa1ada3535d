"""An exception that repeats at other steps ends a run that does little else, and no other run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.journal import as_event

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.verdict import Location, Verdict

HOUR = 3600.0
MINUTE = 60.0


def bug(step: int, *, origin: Origin = Origin.code, line: int = 33) -> Verdict:
    """A reward function that raises in the step after `step`."""
    return Verdict(
        cause=Cause.exception, culprits=(0,), step=step, phase="reward", confidence="proved",
        sentence="It failed.",
        signature=f"KeyError@train.py:{line}:step{step}", deterministic=True, origin=origin,
        exception="KeyError",
        location=Location(file="/w/train.py", line=line, function="judge"),
    )  # fmt: skip


class Night:
    """A run on a simulated clock, with a snapshot after every step.

    Args:
        step_seconds: duration of a step.
        restart_seconds: from a fault to the beginning of the next attempt's first step.
    """

    def __init__(self, *, step_seconds: float, restart_seconds: float) -> None:
        self.history = History()
        self.now = 1000.0
        self.step = 0
        self._step_seconds, self._restart_seconds = step_seconds, restart_seconds
        self._write("run_started")
        self._begin(0)

    def _write(self, event: str, **fields: object) -> None:
        self.history.apply(as_event({"event": event, "time": self.now, "train_call": 1, **fields}))

    def _begin(self, attempt: int) -> None:
        self._write("attempt_started", attempt=attempt)
        self._write(
            "train_started",
            rank=0,
            step=self.step,
            trainer_class="GRPOTrainer",
            output_dir="out",
            target_steps=10**6,
        )

    def train_until(self, time: float) -> None:
        """Take all steps that are finished by then; a step that is not is lost."""
        while self.now + self._step_seconds <= time:
            self.now += self._step_seconds
            self.step += 1
            self._write("step_committed", step=self.step)
            self._write("checkpoint_staged", step=self.step)
        self.now = max(self.now, time)

    def fail(self, what: Verdict) -> Decision:
        """Raise the exception, and start again unless the run ends."""
        self._write(
            "incident", cause=str(what.cause), step=what.step, failed_at=self.now,
            signature=what.signature, repeat_key=what.repeat_key,
        )  # fmt: skip
        decision = decide(self.history, what, Budget(), stopping=False)
        self._write("action", action=str(decision.action), reason=decision.reason)
        self.now += self._restart_seconds
        self._begin(len(self.history.recoveries))
        return decision


def faults_at(night: Night, times: Iterator[float] | list[float], **of_bug: object) -> list[Decision]:
    """Let the run fail at these times after its beginning, each at a newer step, until it ends."""
    began, decisions = night.now, []
    for time in times:
        night.train_until(began + time)
        decisions.append(night.fail(bug(night.step, **of_bug)))  # type: ignore[arg-type]
        if decisions[-1].action is Action.stop:
            break
    return decisions


SLOW_STARTS = [15.0, 2 * MINUTE, 8 * MINUTE]


@pytest.mark.parametrize("restart_seconds", SLOW_STARTS)
@pytest.mark.parametrize("step_seconds", [10.0, 10 * MINUTE])
@pytest.mark.parametrize("offset", [0.5, 0.9])
def test_24_rare_faults_in_a_night_of_8_hours_do_not_end_the_run(
    restart_seconds: float, step_seconds: float, offset: float
) -> None:
    """One every 20 minutes, however long a restart or a step takes."""
    night = Night(step_seconds=step_seconds, restart_seconds=restart_seconds)
    night.train_until(night.now + 10 * MINUTE)  # the run's first step is behind it
    decisions = faults_at(night, [20 * MINUTE * (number + offset) for number in range(24)])
    assert [decision.action for decision in decisions] == [Action.restart] * 24
    assert night.now <= 1000.0 + 8.4 * HOUR


@pytest.mark.parametrize("seed", range(5))
def test_faults_at_random_times_do_not_end_a_run_that_recovers_fast(seed: int) -> None:
    """Five of them may come within minutes: the run gets more done than it repeats."""
    dice = random.Random(seed)
    times = sorted(dice.uniform(2 * MINUTE, 8 * HOUR) for _ in range(24))
    apart = [time for time, last in zip(times, [0.0, *times], strict=False) if time - last > MINUTE]
    decisions = faults_at(Night(step_seconds=3.0, restart_seconds=15.0), apart)
    assert {decision.action for decision in decisions} == {Action.restart}


@pytest.mark.parametrize(("step_seconds", "restart_seconds"), [(1.0, 10.0), (1.0, 4.0), (60.0, 8 * MINUTE)])
def test_a_bug_on_the_third_call_of_every_process_ends_the_run_by_its_fifth_time(
    step_seconds: float, restart_seconds: float
) -> None:
    """Each attempt takes two new steps, so the restart budget is always full. The reason has the count and
    the line.
    """
    night = Night(step_seconds=step_seconds, restart_seconds=restart_seconds)
    decisions = []
    while not decisions or decisions[-1].action is not Action.stop:
        night.train_until(night.now + 2.5 * step_seconds)
        decisions.append(night.fail(bug(night.step)))
        assert len(decisions) <= 5
    assert len(decisions) == 5
    assert "KeyError at train.py:33 in judge (phase reward) was raised 5 times within" in decisions[-1].reason


def test_the_same_bug_at_more_than_half_of_the_pace_continues_as_long_as_it_does() -> None:
    """Each attempt takes two new steps of 10 s and loses 5 s and a restart; then restarts take longer."""
    night = Night(step_seconds=10.0, restart_seconds=4.0)
    decisions = []
    for _ in range(20):
        night.train_until(night.now + 25.0)
        decisions.append(night.fail(bug(night.step)))
    assert {decision.action for decision in decisions} == {Action.restart}
    night._restart_seconds = 10 * MINUTE
    for _ in range(6):
        night.train_until(night.now + 25.0)
        decisions.append(night.fail(bug(night.step)))
    assert decisions[-1].action is Action.stop


@pytest.mark.parametrize("seconds", [HOUR - 8.0, HOUR + 8.0])
def test_five_faults_count_if_an_hour_holds_them(seconds: float) -> None:
    """From the first to the fifth. Nothing else is done in it: each restart takes all the time there is."""
    night = Night(step_seconds=1.0, restart_seconds=seconds / 4 - 2.0)
    night.train_until(night.now + 5.0)
    decisions = faults_at(night, [5.0 + number * seconds / 4 for number in range(5)])
    assert (decisions[-1].action is Action.stop) is (seconds < HOUR)


@pytest.mark.parametrize(
    "other", [{"origin": Origin.network}, {"origin": Origin.files}, {"origin": Origin.device}]
)
def test_what_the_script_is_not_to_blame_for_is_not_counted(other: dict[str, Origin]) -> None:
    """Files, the network and devices: only the restart budget limits them, and it is full after every
    step.
    """
    night = Night(step_seconds=1.0, restart_seconds=60.0)
    night.train_until(night.now + 5.0)
    decisions = faults_at(night, [5.0 + 70.0 * number for number in range(8)], **other)
    assert len(decisions) == 8


def test_two_bugs_are_counted_apart() -> None:
    """By their lines."""
    night = Night(step_seconds=1.0, restart_seconds=60.0)
    for number in range(8):
        night.train_until(night.now + 2.5)
        assert night.fail(bug(night.step, line=30 + number % 2)).action is Action.restart
    night.train_until(night.now + 2.5)
    assert night.fail(bug(night.step, line=30)).action is Action.stop


def test_a_new_launch_counts_anew() -> None:
    """The user has perhaps mended it; the fault before it was the fourth or the last."""
    night = Night(step_seconds=1.0, restart_seconds=60.0)
    for _ in range(4):
        night.train_until(night.now + 2.5)
        night.fail(bug(night.step))
    night._write("run_started")
    night._begin(4)
    for _ in range(4):
        night.train_until(night.now + 2.5)
        assert night.fail(bug(night.step)).action is Action.restart
