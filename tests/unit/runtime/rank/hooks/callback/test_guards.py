"""A guard that trips ends the attempt before the next optimizer step, and one that warns does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.builders.trainers.callback_loop import Events, Loop, with_flags
from transformers import TrainerControl

from grpo_run.runtime.errors import GuardTripped
from grpo_run.watchdog.learning_observations import StepValues
from grpo_run.watchdog.learning_rules import GuardResponse, LearningGuard, Rules


def test_a_step_that_is_not_finite_ends_the_attempt_before_anything_else(loop: Loop) -> None:
    """At its own end: the next rollout would fail with such weights, and a save would keep them."""
    loop.step()
    loop.values = StepValues(finite=False)
    with pytest.raises(GuardTripped) as tripped:
        loop.step()
    assert tripped.value.trip is not None
    assert (tripped.value.trip.guard, tripped.value.trip.step) == (LearningGuard.nonfinite, 2)
    assert loop.saved == []


def test_a_guard_of_another_rank_ends_the_attempt_before_the_next_optimizer_step(
    session: Any, loop: Loop
) -> None:
    """Only that rank knows what it is."""
    start = session.votes.start
    session.votes.start = lambda vote: start(with_flags(vote, nonfinite=True, tripped=True))
    loop.step()
    with pytest.raises(GuardTripped) as tripped:
        loop.callback.on_pre_optimizer_step(loop.args, loop.state, TrainerControl())
    assert tripped.value.trip is None


def test_a_guard_that_warns_is_journaled_once(session: Any, events: Events) -> None:
    """Training goes on."""
    responses = {LearningGuard.nonfinite: GuardResponse.warn}
    session.config = replace(session.config, guards=Rules(responses=responses))
    loop = Loop(session)
    loop.begin()
    loop.values = StepValues(finite=False)
    for _ in range(4):
        loop.step()
    tripped = [record for record in events() if record["event"] == "guard_tripped"]
    assert [(record["step"], record["guard"], record["response"]) for record in tripped] == [
        (1, "nonfinite", "warn")
    ]


def test_a_rollout_that_timed_out_is_known_to_the_first_rank(loop: Loop, events: Events) -> None:
    """It goes into the next vote, once."""
    loop.step_vote.report_timed_out()
    for _ in range(3):
        loop.step()
    assert [one["step"] for one in events() if one["event"] == "rollout_timed_out"] == [1]
