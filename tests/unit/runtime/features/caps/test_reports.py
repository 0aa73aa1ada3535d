"""Cuts are journaled, and a rollout that is done again is cut as before."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._reports import RolloutReports
from grpo_run.runtime.features.caps._rollout import CappedRollout, Cut, DeadlineDecision
from grpo_run.runtime.features.caps.rank import PART
from grpo_run.runtime.features.caps.settings import ENDS
from grpo_run.runtime.rank.points import RolloutPoints
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.watchdog.observation import EndReason

Events = Callable[[], list[dict[str, Any]]]


def test_cuts_are_journaled(session: Any, events: Events) -> None:
    """A rollout without a cut leaves no line."""
    cut = Cut(length=3, reason=EndReason.repetition)
    reports = RolloutReports(lambda: (7, "train"), session, CapSettings(repetition=8), 1)
    for cuts in ([None, cut, None], [None, None, None]):
        rollout = CappedRollout(end_tokens={1}, max_length=5)
        rollout.end_turn([[9], [9], [9]], [[5, 1], [5, 5, 5], [5, 6, 7, 8, 9]], cuts)
        rollout.steps = 5
        assert reports.begin() is None
        reports.ended(rollout)
    found = [event for event in events() if event["event"] == "completions_capped"]
    assert [(one["step"], one["completions"], one["repetition"], one["decoding_steps"]) for one in found] == [
        (7, 3, 1, 5)
    ]


def test_without_a_cap_the_trainer_stays_as_it_is(session: Any) -> None:
    """Not even its prompts are looked at."""
    trainer = SimpleNamespace(args=SimpleNamespace())
    points = RolloutPoints(facts=TrainerFacts.of(trainer, 1))
    PART.rollouts(trainer, session, 1, points)
    assert points.generation == points.turns == points.leaving == []
    assert vars(trainer).keys() == {"args"}


def test_a_rollout_that_is_generated_again_gets_its_decision(session: Any) -> None:
    """By call, step, mode and number; another number of ranks decides anew."""
    position = (0, "train")
    settings = CapSettings(max_time=5.0)

    def decisions() -> list[DeadlineDecision | None]:
        nonlocal position
        found: list[DeadlineDecision | None] = []
        reports = RolloutReports(lambda: position, session, settings, 2)
        for step, training in ((0, True), (0, True), (1, False), (1, True)):
            position = step, "train" if training else "eval"
            found.append(reports.begin())
            rollout = CappedRollout(end_tokens={1}, max_length=5)
            rollout.end_turn([[9]], [[5, 6]], [None])
            rollout.steps, rollout.timed_out_after = 10 * len(found), len(found) if training else None
            reports.ended(rollout)
        return found

    expected = [
        DeadlineDecision(steps=10, timed_out_after=1),
        DeadlineDecision(steps=20, timed_out_after=2),
        DeadlineDecision(steps=30, timed_out_after=None),
        DeadlineDecision(steps=40, timed_out_after=4),
    ]
    assert decisions() == [None] * 4
    assert decisions() == expected
    session.world_size = 7
    assert decisions() == [None] * 4


def test_the_ends_of_caps_can_leave_the_loss() -> None:
    """The option takes every end of a cap, by the word that the journal has for it."""
    assert sorted(end.value for end in EndReason if end is not EndReason.eos) == sorted(ENDS)
