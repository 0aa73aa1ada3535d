"""A learning guard that trips: one exact repetition, one with fresh samples, then the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event, read_records

from grpo_run.runtime.features.learning_guards._judge import Trip
from grpo_run.runtime.features.learning_guards.events import PART as HISTORY
from grpo_run.runtime.features.learning_guards.rank import alarm_of
from grpo_run.runtime.features.learning_guards.settings import GuardResponse, LearningGuard
from grpo_run.runtime.features.learning_guards.supervisor import PART, SAME_PLACE_STEPS
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.recovery import Action, Decision, pending_rollback
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.supervisor.points import Fault
from grpo_run.runtime.supervisor.policy import decide
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict


def trip(
    guard: LearningGuard = LearningGuard.reward, *, step: int = 60, onset: int = 58, **fields: Any
) -> Trip:
    """A trip of a guard."""
    fields = {"response": GuardResponse.roll_back, "sentence": "It fell.", **fields}
    return Trip(guard=guard, step=step, onset=onset, **fields)


class Story:
    """A run that trains and fails; every fault is decided as the supervisor does."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.run = RunDirectory(path=path / "run")
        self.run.create()
        self.live = LiveHistory(self.run.journal, "run", parts=[HISTORY()])
        self.history = self.live.history
        reporter = Reporter(self.live, str(path), lambda text: None)
        self.feature = PART(config, self.run, self.history, reporter)
        self.files = AttemptFiles(self.run, 1)
        self.budget = Budget()

    def trips(self, one: Trip, *, call: int = 1, **arguments: Any) -> Decision:
        """A guard trips."""
        alarm = alarm_of(one)
        self.live.write(
            event(
                "incident", cause=alarm.cause, step=one.step, train_call=call, guard=alarm.details,
                signature=alarm.signature,
            )
        )  # fmt: skip
        verdict = Verdict(
            cause=Cause(alarm.cause), step=one.step, sentence=alarm.sentence, signature=alarm.signature,
            alarm=alarm,
        )  # fmt: skip
        answer = self.feature.answer(Fault(verdict=verdict, failed_ranks=(0,), files=self.files))
        assert answer is not None
        decision = decide(
            self.history, verdict, self.budget, stopping=False, answer=answer.decision, **arguments
        )
        self.live.write(
            event(
                "action", action=str(decision.action), before_step=decision.before_step,
                fresh_from=decision.fresh_from,
            )
        )  # fmt: skip
        return decision

    def is_killed(self) -> None:
        """Another fault in between."""
        self.live.write(event("incident", cause="signal", step=59, signature="x", train_call=1))
        self.live.write(event("action", action="restart"))

    def saves(self, step: int) -> None:
        """A new highest checkpoint refills the budget."""
        self.live.write(event("checkpoint_published", step=step, train_call=1, path="p"))


@pytest.fixture
def story(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Story:
    """A new run."""
    return Story(tmp_path, make_config())


def test_the_order_of_the_repetitions(story: Story) -> None:
    """Exactly, then with fresh samples shortly before the onset, then the end."""
    first = story.trips(trip())
    assert (first.action, first.before_step, first.fresh_from) == (
        Action.restart_from_earlier_checkpoint, 58, None,
    )  # fmt: skip
    second = story.trips(trip())
    assert (second.action, second.before_step, second.fresh_from) == (
        Action.restart_from_earlier_checkpoint, 58, 56,
    )  # fmt: skip
    assert story.trips(trip()).action is Action.stop
    assert story.feature.rank_settings(3, story.files) == {
        "fresh_seeds": [{"number": 2, "train_call": 1, "step": 56}]
    }


def test_a_gradient_belongs_to_the_samples_of_its_own_step(story: Story) -> None:
    """Fresh samples before it would give up equality for nothing."""
    story.trips(trip(LearningGuard.nonfinite, step=60, onset=60))
    assert story.trips(trip(LearningGuard.nonfinite, step=60, onset=60)).fresh_from == 60


def test_a_delayed_collapse_is_the_same_one(story: Story) -> None:
    """Fresh samples may delay it."""
    story.trips(trip())
    story.trips(trip())
    story.saves(70)
    assert story.trips(trip(step=60 + SAME_PLACE_STEPS, onset=75)).action is Action.stop


@pytest.mark.parametrize(
    ("later", "call"),
    [(trip(step=61 + SAME_PLACE_STEPS, onset=80), 1), (trip(LearningGuard.kl), 1), (trip(), 2)],
)
def test_another_collapse_begins_with_an_exact_repetition(later: Trip, call: int, story: Story) -> None:
    """Much later, of another guard, or in another call."""
    story.trips(trip())
    story.trips(trip())
    story.saves(70)
    decision = story.trips(later, call=call)
    assert decision.action is Action.restart_from_earlier_checkpoint
    assert decision.fresh_from is None


def test_another_fault_in_between_changes_nothing(story: Story) -> None:
    """A rank that is killed during the repetition."""
    story.budget = Budget(failures_without_progress=9)
    story.trips(trip())
    story.is_killed()
    assert story.trips(trip()).fresh_from == 56
    story.is_killed()
    assert story.trips(trip()).action is Action.stop


def test_stop_stops_and_the_budget_holds(story: Story) -> None:
    """A guard that is set to stop; nothing to go back to; a run that may not restart."""
    assert story.trips(trip(response=GuardResponse.stop)).action is Action.stop
    decision = story.trips(trip(LearningGuard.kl), can_go_back=False)
    assert decision.action is Action.stop
    assert "no checkpoint from before the onset at step 58 is left" in decision.reason
    story.budget = Budget(failures_without_progress=0)
    assert "budget 0" in story.trips(trip(LearningGuard.entropy)).reason


def test_each_trip_is_journaled_and_counted(story: Story) -> None:
    """Also of a guard that stops the run. A warning lets a step pass that is not finite."""
    story.live.write(event("guard_tripped", guard="nonfinite", step=4, onset=4, response="warn"))
    story.trips(trip(LearningGuard.nonfinite, step=60, onset=60))
    story.trips(trip(response=GuardResponse.stop))
    found = [record for record in read_records(story.run.journal) if record["event"] == "guard_tripped"]
    assert [(one["guard"], one["step"], one["onset"], one["response"]) for one in found] == [
        ("nonfinite", 4, 4, "warn"), ("nonfinite", 60, 60, "roll-back"), ("reward", 60, 58, "stop"),
    ]  # fmt: skip
    counted = story.history.part(HISTORY)
    assert (dict(counted.counts), counted.nonfinite_refused) == ({"nonfinite": 2, "reward": 1}, 1)


def test_another_fault_is_not_answered(story: Story) -> None:
    """It is no trip."""
    verdict = Verdict(cause=Cause.signal, step=3, sentence="Killed.", signature="s")
    assert story.feature.answer(Fault(verdict=verdict, failed_ranks=(0,), files=story.files)) is None


def test_a_rollback_is_pending_until_it_was_carried_out(story: Story) -> None:
    """Also for a new supervisor, which replays the journal."""
    assert pending_rollback(story.history.recoveries) is None
    story.trips(trip())
    assert pending_rollback(story.history.recoveries) is not None
    story.live.write(event("rolled_back", train_call=1, step=40))
    assert pending_rollback(story.history.recoveries) is None
    story.is_killed()
    assert pending_rollback(story.history.recoveries) is None
