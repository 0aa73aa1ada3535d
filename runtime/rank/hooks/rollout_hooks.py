"""The hooks of generation and rewards on one trainer, in the order in which they wrap one another.

Called by `train_call.py`. A hook that is entered later calls the ones entered before it. The outermost replaces
quarantined prompts, and exclusion masks samples outside everything that TRL computes for them, but inside the phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.rank.hooks.phases import mark_trainer
from grpo_run.runtime.rank.hooks.tools import mark_tools
from grpo_run.runtime.rank.rewards.generators import read_generators, write_generators
from grpo_run.runtime.rank.rewards.served import rewards_of
from grpo_run.runtime.rank.rollouts.capping import capped_rollouts
from grpo_run.runtime.rank.rollouts.forecast import Forecasts
from grpo_run.runtime.rank.rollouts.forecast_splitting import forecasting
from grpo_run.runtime.rank.rollouts.quarantine import PromptQuarantine
from grpo_run.runtime.rank.rollouts.repeated_masking import read_earlier
from grpo_run.runtime.rank.rollouts.sample_masking import SampleExclusion
from grpo_run.runtime.rank.rollouts.sub_batches import in_sub_batches
from grpo_run.runtime.rank.saving import description
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.step_vote import StepVote


@contextmanager
def rollouts_hooked(
    trainer: Any, session: Session, train_call: int, step_vote: StepVote, forecasts: Forecasts | None
) -> Iterator[None]:
    """Bound, mark and record the rollouts of a trainer for the length of the block.

    Args:
        train_call: number of the call in the run.
        step_vote: receives the phases, and whether a rollout was cut at its deadline.
        forecasts: of this call; None if there are none.

    Raises:
        ConfigError: a cap cannot be applied.
    """
    with ExitStack() as hooks:
        hooks.enter_context(rewards_of(session).served(trainer))
        parts = session.settings.memory_plan.generation_sub_batches
        sharded = description.layout(trainer) != description.REPLICATED
        hooks.enter_context(in_sub_batches(trainer, parts, sharded=sharded, warn=session.warn))
        end_reasons = hooks.enter_context(
            capped_rollouts(trainer, session, train_call, step_vote.report_timed_out)
        )
        quarantine = PromptQuarantine(trainer, session, train_call)
        exclusion = SampleExclusion(
            trainer,
            session,
            quarantine.row_reasons(end_reasons),
            train_call=train_call,
            earlier=read_earlier(session, train_call),
            generators=(read_generators, write_generators),
        )
        hooks.enter_context(exclusion.scoring())
        hooks.enter_context(mark_trainer(trainer, session.slot, step_vote.fingerprint))
        hooks.enter_context(forecasting(trainer, forecasts, step_vote))
        hooks.enter_context(exclusion.rewarding())
        hooks.enter_context(quarantine.attached())
        hooks.enter_context(mark_tools(trainer, session))
        yield
