"""A learning guard that trips: one exact repetition, one with fresh samples, then the end."""

from __future__ import annotations

from typing import Any

import pytest
from support.journal import as_event, as_events

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision, orders_of, pending_rollback
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.supervisor.policy import SAME_PLACE_STEPS, decide
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.learning_rules import GuardResponse, LearningGuard, Trip
from grpo_run.watchdog.verdict import Verdict


def trip(
    guard: LearningGuard = LearningGuard.reward, *, step: int = 60, onset: int = 58, **fields: Any
) -> Trip:
    """A trip of a guard."""
    fields = {"response": GuardResponse.roll_back, "sentence": "It fell.", **fields}
    return Trip(guard=guard, step=step, onset=onset, **fields)


class Story:
    """A run that trains and fails; every fault is decided as the supervisor does."""

    def __init__(self, budget: Budget | None = None) -> None:
        self.history = History.of(as_events([{"event": "run_started", "time": 0.0}]))
        self.budget = budget or Budget()

    def trips(self, one: Trip, *, call: int = 1, **arguments: Any) -> Decision:
        """A guard trips."""
        self.history.apply(
            as_event({
                "event": "incident", "cause": "learning_collapse", "step": one.step, "train_call": call,
                "guard": to_json(one), "signature": f"{one.guard}",
            })
        )  # fmt: skip
        verdict = Verdict(
            cause=Cause.learning_collapse, culprits=(), step=one.step, phase=None, confidence="proved",
            sentence="It fell.",
            signature="s", deterministic=False, trip=one,
        )  # fmt: skip
        decision = decide(self.history, verdict, self.budget, stopping=False, **arguments)
        self.history.apply(
            as_event({
                "event": "action", "action": str(decision.action), "before_step": decision.before_step,
                "fresh_from": decision.fresh_from,
            })
        )  # fmt: skip
        return decision

    def is_killed(self) -> None:
        """Another fault in between."""
        self.history.apply(
            as_event({"event": "incident", "cause": "signal", "step": 59, "signature": "x", "train_call": 1})
        )
        self.history.apply(as_event({"event": "action", "action": "restart"}))

    def saves(self, step: int) -> None:
        """A new highest checkpoint refills the budget."""
        self.history.apply(
            as_event({"event": "checkpoint_published", "step": step, "train_call": 1, "path": "p"})
        )


def test_the_order_of_the_repetitions() -> None:
    """Exactly, then with fresh samples shortly before the onset, then the end."""
    story = Story()
    first = story.trips(trip())
    assert (first.action, first.before_step, first.fresh_from) == (
        Action.restart_from_earlier_checkpoint, 58, None,
    )  # fmt: skip
    second = story.trips(trip())
    assert (second.action, second.before_step, second.fresh_from) == (
        Action.restart_from_earlier_checkpoint, 58, 56,
    )  # fmt: skip
    assert story.trips(trip()).action is Action.stop
    (order,) = orders_of(story.history.recoveries)
    assert (order.number, order.train_call, order.step) == (2, 1, 56)


def test_a_gradient_belongs_to_the_samples_of_its_own_step() -> None:
    """Fresh samples before it would give up equality for nothing."""
    story = Story()
    story.trips(trip(LearningGuard.nonfinite, step=60, onset=60))
    assert story.trips(trip(LearningGuard.nonfinite, step=60, onset=60)).fresh_from == 60


def test_a_delayed_collapse_is_the_same_one() -> None:
    """Fresh samples may delay it."""
    story = Story()
    story.trips(trip())
    story.trips(trip())
    story.saves(70)
    assert story.trips(trip(step=60 + SAME_PLACE_STEPS, onset=75)).action is Action.stop


@pytest.mark.parametrize(
    ("later", "call"),
    [(trip(step=61 + SAME_PLACE_STEPS, onset=80), 1), (trip(LearningGuard.kl), 1), (trip(), 2)],
)
def test_another_collapse_begins_with_an_exact_repetition(later: Trip, call: int) -> None:
    """Much later, of another guard, or in another call."""
    story = Story()
    story.trips(trip())
    story.trips(trip())
    story.saves(70)
    decision = story.trips(later, call=call)
    assert decision.action is Action.restart_from_earlier_checkpoint
    assert decision.fresh_from is None


def test_another_fault_in_between_changes_nothing() -> None:
    """A rank that is killed during the repetition."""
    story = Story(Budget(failures_without_progress=9))
    story.trips(trip())
    story.is_killed()
    assert story.trips(trip()).fresh_from == 56
    story.is_killed()
    assert story.trips(trip()).action is Action.stop


def test_stop_stops_and_the_budget_holds() -> None:
    """A guard that is set to stop; a run that may not restart; nothing to go back to."""
    assert Story().trips(trip(response=GuardResponse.stop)).action is Action.stop
    assert Story(Budget(failures_without_progress=0)).trips(trip()).action is Action.stop
    decision = Story().trips(trip(), can_go_back=False)
    assert decision.action is Action.stop
    assert "no checkpoint from before the onset" in decision.reason


def test_a_rollback_is_pending_until_it_was_carried_out() -> None:
    """Also for a new supervisor, which replays the journal."""
    story = Story()
    assert pending_rollback(story.history.recoveries) is None
    story.trips(trip())
    assert pending_rollback(story.history.recoveries) is not None
    story.history.apply(as_event({"event": "rolled_back", "train_call": 1, "step": 40}))
    assert pending_rollback(story.history.recoveries) is None
    story.is_killed()
    assert pending_rollback(story.history.recoveries) is None
