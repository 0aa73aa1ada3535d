"""The memory plan at the points of a rank: applied where trainers are built, checked where they train."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from grpo_run.runtime.upstream.patches import Handler


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
            divide = in_sub_batches(trainer, parts, sharded=points.facts.is_sharded, warn=session.warn)
            points.turns += [divide] if divide is not None else []


NOT_DIVIDED = (
    "the memory plan divides generation into {count} parts, but the model's input has images, or it does not"
    " generate with transformers' `generate`: it is generated in one part"
)


def in_sub_batches(trainer: Any, count: int, *, sharded: bool, warn: Callable[[str], None]) -> Handler | None:
    """Return a handler that divides the calls of `generate` in a turn; None if they stay whole.

    Every rank makes as many calls as every other: where parameters are sharded, each call gathers them on all
    ranks, so turns with tools, which not every rank has, are not divided there. What vLLM or a script's own
    function generates is not divided.

    Args:
        count: parts of a call; 1 changes nothing.
        sharded: a call of `generate` is collective.
        warn: called once with a line if calls cannot be divided.
    """
    # imports torch, which only the script may import first
    from grpo_run.runtime.rank.rollouts import generate_calls

    if count < 2 or getattr(trainer, "use_vllm", False) or (sharded and getattr(trainer, "tools", None)):
        return None
    generate_calls.install()
    warn_once = functools.cache(warn)

    def divide_generation(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Generate a turn in parts."""
        with generate_calls.in_parts(count) as parts:
            result = original(*args, **kwargs)
        completions = result[0] if isinstance(result, tuple) else result
        if len(completions) > 1 and parts.whole == parts.calls:
            warn_once(NOT_DIVIDED.format(count=count))
        return result

    return divide_generation


def _wrap_generate(module: Any) -> None:
    """Wrap `generate` before a script can keep it in a function of its own."""
    from grpo_run.runtime.rank.rollouts import generate_calls

    generate_calls.install()


PART = MemoryPlanPart()
