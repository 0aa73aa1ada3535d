"""The methods of a trainer that are wrapped around generation, rewards and evaluation, in one table.

Called by `train_call.py`. The table lists for each method what is called around it, from the outside in. The
order matters: features see the rows before anything is generated, samples are masked outside
everything that TRL computes for them but inside the phase, and caps see what divided turns return. What each
part does is described in its own module; this one knows only their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.rank.hooks._phases import mark_rewards, marked
from grpo_run.runtime.rank.hooks._tools import mark_tools
from grpo_run.runtime.rank.points import RolloutPoints
from grpo_run.runtime.rank.rewards.generators import read_generators, write_generators
from grpo_run.runtime.rank.rewards.served import rewards_of
from grpo_run.runtime.rank.rollouts.capping import Capping, capping_of
from grpo_run.runtime.rank.rollouts.counting import counted
from grpo_run.runtime.rank.rollouts.kept_completions import KeptCompletions
from grpo_run.runtime.rank.rollouts.repeated_masking import read_earlier
from grpo_run.runtime.rank.rollouts.sample_masking import SampleMasking
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
        step_vote: receives the phases, and whether a rollout was cut at its deadline.

    Raises:
        ConfigError: a cap cannot be applied.
    """
    session = guard.session
    slot, fingerprint = session.slot, step_vote.fingerprint
    with ExitStack() as hooks:
        hooks.enter_context(rewards_of(session).served(trainer))
        caps = capping_of(trainer, session, train_call, step_vote.report_timed_out)
        points = RolloutPoints()
        for feature in guard.features:
            feature.rollouts(trainer, session, train_call, points)
        masking = SampleMasking(
            trainer,
            session,
            _end_reasons(caps),
            leaving=points.row_reasons,
            train_call=train_call,
            earlier=read_earlier(session, train_call),
            generators=(read_generators, write_generators),
        )
        groups = session.config.log_completions
        kept = KeptCompletions(trainer, session, train_call, groups) if groups else None
        around: dict[str, Sequence[Handler | None]] = {
            trainer_names.GENERATE_AND_SCORE: (
                *points.inputs,
                marked(Phase.score, slot, fingerprint),
                masking.mask_samples if masking.is_possible else None,
            ),
            trainer_names.GENERATE: (
                marked(Phase.generate, slot, fingerprint),
                counted(trainer, slot, caps),
                caps.cap_rollout if caps else None,
            ),
            trainer_names.SINGLE_TURN: (caps.cap_turn if caps else None, *points.turns),
            trainer_names.CALCULATE_REWARDS: (
                kept.keep if kept else None,
                masking.choose_samples if masking.is_possible else None,
                marked(Phase.reward, slot, fingerprint),
            ),
            "evaluate": (marked(Phase.eval, slot, fingerprint),),
        }
        mark_rewards(trainer, slot, session.reward_seconds)
        if caps is not None:
            hooks.enter_context(caps.prepared())
        hooks.enter_context(wrapped_methods(trainer, around))
        hooks.enter_context(mark_tools(trainer, facts, session))
        yield


def _end_reasons(caps: Capping | None) -> Callable[[], Sequence[str] | None]:
    """Return a function that says why each completion of the last rollout ended; None without caps."""

    def reasons() -> Sequence[str] | None:
        found = None if caps is None else caps.end_reasons()
        return None if found is None else [reason.value for reason in found]

    return reasons
