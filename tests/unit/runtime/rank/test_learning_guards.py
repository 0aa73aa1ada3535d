"""The guards of one rank: their state in a checkpoint, and fresh seeds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from grpo_run.runtime.history.recovery import FreshSeeds
from grpo_run.runtime.rank.learning import LearningGuards, seed_of
from grpo_run.watchdog.learning_observations import StepValues


@pytest.fixture(autouse=True)
def _keep_seeds() -> Any:
    """Restore the generators."""
    python, state = random.getstate(), torch.random.get_rng_state()
    yield
    random.setstate(python)
    torch.random.set_rng_state(state)


def ordered(session: Any, *orders: FreshSeeds) -> LearningGuards:
    """The guards of call 1, with orders."""
    session.settings = session.settings.model_copy(update={"fresh_seeds": orders})
    return LearningGuards(session, 1, sampling_group=0)


def test_a_resumed_run_raises_the_same_alarm(session: Any) -> None:
    """The history is cut in the middle, travels as JSON, and the alarm comes at the same step."""

    def alarms(restart_at: int | None) -> list[str]:
        session.notified.clear()
        guards = LearningGuards(session, 1, sampling_group=0)
        for step in range(1, 41):
            guards.end_step(step, StepValues(reward=1.0 if step < 30 else 0.0))
            if step == restart_at:
                state = json.loads(json.dumps(guards.state()))
                guards = LearningGuards(session, 1, sampling_group=0)
                guards.load(state)
        return list(session.notified)

    undisturbed = alarms(None)
    assert len(undisturbed) == 1
    assert "at step 30" in undisturbed[0]
    for step in (1, 20, 31, 35):
        assert alarms(step) == undisturbed


@pytest.mark.parametrize(
    "state", [None, {}, {"history": 3}, {"history": {"reward": [1]}}, {"fresh_seeds": ["a"]}]
)
def test_a_checkpoint_without_a_readable_history_is_accepted(session: Any, state: Any) -> None:
    """Of an older release."""
    guards = LearningGuards(session, 1, sampling_group=0)
    guards.load(state)
    guards.end_step(1, StepValues(reward=1.0))


def test_fresh_seeds_are_used_once_from_their_step_on(session: Any) -> None:
    """Not before, not again at the next step, and not again after a resume."""
    guards = ordered(session, FreshSeeds(number=2, train_call=1, step=5))
    torch.manual_seed(1)
    guards.begin_step(4)
    assert torch.initial_seed() == 1
    guards.begin_step(5)
    seed = torch.initial_seed()
    assert seed == seed_of("run-1", FreshSeeds(number=2, train_call=1, step=5), 0)
    torch.manual_seed(1)
    guards.begin_step(6)
    assert torch.initial_seed() == 1
    resumed = ordered(session, FreshSeeds(number=2, train_call=1, step=5))
    resumed.load(guards.state())
    resumed.begin_step(7)
    assert torch.initial_seed() == 1
    earlier = ordered(session, FreshSeeds(number=2, train_call=1, step=5))
    earlier.begin_step(9)  # resumed from a checkpoint after the step whose history knows nothing of the order
    assert torch.initial_seed() == seed


def test_seeds_differ_by_rank_and_order_and_are_reproducible(session: Any) -> None:
    """Ranks that sampled alike would generate the same completions."""
    orders = [FreshSeeds(number=number, train_call=1, step=5) for number in (1, 2)]
    seeds = [seed_of("run-1", order, rank) for order in orders for rank in range(8)]
    assert len(set(seeds)) == 16
    assert seeds == [seed_of("run-1", order, rank) for order in orders for rank in range(8)]


def test_an_order_for_another_call_is_ignored(session: Any) -> None:
    """Calls are numbered in the run."""
    guards = ordered(session, FreshSeeds(number=1, train_call=2, step=1))
    torch.manual_seed(1)
    guards.begin_step(5)
    assert torch.initial_seed() == 1
