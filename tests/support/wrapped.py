"""Put the handlers of one part around the methods of a trainer, as `rollouts_hooked` does with all parts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.patches import wrapped_methods


def with_feature(
    part: RankFeature, trainer: Any, session: Any, train_call: int = 1, **others: Any
) -> AbstractContextManager[None]:
    """Let a feature act on the trainer's rollouts for the length of the block.

    Args:
        others: what other features have added to the points.
    """
    points = RolloutPoints(facts=TrainerFacts.of(trainer, 1), **others)
    part.rollouts(trainer, session, train_call, points)
    handlers = {
        "_generate_and_score_completions": [*points.inputs, *points.scoring],
        "_calculate_rewards": points.rewards,
    }
    return wrapped_methods(trainer, handlers)
