"""The methods of a trainer that are wrapped around generation, rewards and evaluation, in one table.

Called by `train_call.py`. The table lists for each method what is called around it, from the outside in. The
order matters: features see the rows before anything is generated, they see what TRL has scored inside the
phase, and a turn after its sub-batches are joined. What each part does is described in its own module; this
one knows only their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.rank.hooks._phases import marked
from grpo_run.runtime.rank.hooks._reward_functions import rewards_wrapped
from grpo_run.runtime.rank.hooks._tools import mark_tools
from grpo_run.runtime.rank.points import RolloutPoints
from grpo_run.runtime.rank.rollouts.counting import counted
from grpo_run.runtime.rank.step.guard import AttemptState
from grpo_run.runtime.rank.step.step_vote import StepVote
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import Handler, wrapped_methods
from grpo_run.watchdog.observation import Phase


@contextmanager
def rollouts_hooked(
    trainer: Any, facts: TrainerFacts, guard: AttemptState, train_call: int, step_vote: StepVote
) -> Iterator[None]:
    """Bound, mark and record the rollouts of a trainer for the length of the block.

    Args:
        train_call: number of the call in the run.
        step_vote: receives the phases.

    Raises:
        ConfigError: the trainer cannot do what the run asks of a feature.
    """
    session = guard.session
    slot, fingerprint = session.slot, step_vote.fingerprint
    with ExitStack() as hooks:
        points = RolloutPoints(facts=facts, hooks=hooks)
        for feature in guard.features:
            feature.rollouts(trainer, session, train_call, points)
        around: dict[str, Sequence[Handler | None]] = {
            trainer_names.GENERATE_AND_SCORE: (
                *points.inputs,
                marked(Phase.score, slot, fingerprint),
                *points.scoring,
            ),
            trainer_names.GENERATE: (
                marked(Phase.generate, slot, fingerprint),
                counted(trainer, slot, points.ends),
                *points.generation,
            ),
            trainer_names.SINGLE_TURN: points.turns,
            trainer_names.CALCULATE_REWARDS: (*points.rewards, marked(Phase.reward, slot, fingerprint)),
            "evaluate": (marked(Phase.eval, slot, fingerprint),),
        }
        hooks.enter_context(rewards_wrapped(trainer, session, points.reward_functions))
        hooks.enter_context(wrapped_methods(trainer, around))
        hooks.enter_context(mark_tools(trainer, facts, session, points.agents))
        yield
