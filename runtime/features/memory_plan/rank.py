"""The memory plan at the points of a rank: applied where trainers are built, checked where they train."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import wrapt

from grpo_run.runtime.features.memory_plan import _configuration as configuration
from grpo_run.runtime.features.memory_plan._remedies import GENERATION_PARTS, text_of
from grpo_run.runtime.features.memory_plan._remedy import Plan
from grpo_run.runtime.features.memory_plan.events import MemoryPlanApplied
from grpo_run.runtime.features.memory_plan.settings import MemoryPlanSettings
from grpo_run.runtime.memory.script_settings import OriginalSettings
from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session


class MemoryPlanPart(RankFeature):
    """The memory plan of this rank."""

    name = MemoryPlanSettings.NAME
    _plan: Plan = MappingProxyType({})

    def script_begins(self, session: Session) -> None:
        """Apply the plan to every trainer that the script builds, and let calls of generation be divided."""
        plan = self._plan = session.settings.features.get(self.name, {})

        def report(made: Any, record: OriginalSettings) -> None:
            if session.is_main:
                session.journal.write(
                    MemoryPlanApplied(
                        rank=0,
                        config=type(made).__name__,
                        plan=text_of(plan),
                        per_device_train_batch_size=made.per_device_train_batch_size,
                        gradient_accumulation_steps=made.gradient_accumulation_steps,
                        divided_by=record.divided_by,
                    )
                )

        wrapt.register_post_import_hook(
            lambda module: configuration.install(module.Trainer, module.TrainingArguments, plan, report),
            "transformers.trainer",
        )
        if GENERATION_PARTS.of(plan) > 1:
            wrapt.register_post_import_hook(_wrap_generate, "transformers.generation.utils")

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Check that the plan is in effect."""
        for warning in configuration.check(trainer, self._plan):
            session.warn(warning)

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Divide the calls of generation."""
        parts = GENERATION_PARTS.of(self._plan)
        if parts > 1:
            # imports torch, which only the script may import first
            from grpo_run.runtime.rank.rollouts.generate_calls import in_sub_batches

            divide = in_sub_batches(trainer, parts, sharded=points.facts.is_sharded, warn=session.warn)
            points.turns += [divide] if divide is not None else []


def _wrap_generate(module: Any) -> None:
    """Wrap `generate` before a script can keep it in a function of its own."""
    from grpo_run.runtime.rank.rollouts import generate_calls

    generate_calls.install()


PART = MemoryPlanPart()
