"""Warn that a memory plan has no effect on training without a Trainer.

A plan is applied to the configuration of a Trainer. Called at the first optimizer step of a script's own, and when a hand-written
loop begins.
"""

from __future__ import annotations

from grpo_run.trainers.rank.session import Session


def warn_of_no_effect(session: Session) -> None:
    """Warn, unless the plan is empty or of a kind that the allocator alone applies."""
    plan = session.settings.memory_plan.model_copy(update={"expandable_segments": False})
    if plan.changed:
        session.warn(
            f"the memory plan {plan.text} has no effect on training of the script's own: it changes the configuration of a Trainer"
        )
