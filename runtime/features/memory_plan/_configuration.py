"""Apply a memory plan where a trainer is built, and check at `train()` that it stayed in effect.

`install` wraps the constructor of `transformers.Trainer` and of every subclass. The outermost constructor
that is given a configuration passes on a copy with the plan's settings, so TRL's trainers derive everything
from them, and the script's own configuration, which may be the source of others, stays as the script has set
it. Values are absolute. Without a plan nothing is copied; what the trainer was built with is noted in any
case (`runtime/memory/script_settings.py`), because a setting that changes between there and `train()` is one
that no plan can change.

Called by `rank.py`. The changes themselves are in `_remedies.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.memory_plan._remedies import NO_EFFECT, differing
from grpo_run.runtime.features.memory_plan._remedy import Build, Plan
from grpo_run.runtime.memory.script_settings import (
    ATTRIBUTE,
    OriginalSettings,
    checkpoints_activations,
    record_of,
)

_GIVEN = "_grpo_run_given"
"""Attribute of a trainer: the script's configuration, and the values that it had when the trainer was
built.
"""


def install(
    trainer_class: Any,
    arguments_class: type,
    plan: Plan,
    report: Callable[[Any, OriginalSettings], None] = lambda made, record: None,
) -> None:
    """Build every trainer from now on with the plan.

    Args:
        trainer_class: `transformers.Trainer`, or what stands for it.
        arguments_class: of configurations.
        plan: to apply; one without changes is only noted.
        report: called with each configuration that the plan has changed, and what the script had set.
    """

    def wrap(kind: Any) -> None:
        original = kind.__init__

        @functools.wraps(original)
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            given: list[Any] = [one for one in (*args, *kwargs.values()) if isinstance(one, arguments_class)]
            if _GIVEN in vars(self) or not given:
                original(self, *args, **kwargs)
                return
            source = given[0]
            values = {one.name: getattr(source, one.name, None) for one in dataclasses.fields(source)}
            vars(self)[_GIVEN] = (source, values)
            made, record = apply(source, plan)
            original(
                self,
                *(made if one is source else one for one in args),
                **{name: made if one is source else one for name, one in kwargs.items()},
            )
            record.keep(self.args)  # SFTTrainer makes its own of a plain one
            if plan:
                report(self.args, record)

        kind.__init__ = build

    def subclass(kind: Any, /, **kwargs: Any) -> None:
        super(trainer_class, kind).__init_subclass__(**kwargs)
        if "__init__" in vars(kind):
            wrap(kind)

    known: list[Any] = [trainer_class, *_subclasses(trainer_class)]  # a warm interpreter has TRL's already
    for one in known:
        if "__init__" in vars(one):
            wrap(one)
    trainer_class.__init_subclass__ = classmethod(subclass)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    below: list[type[Any]] = type.__subclasses__(kind)
    for one in below:
        yield one
        yield from _subclasses(one)


def apply(source: Any, plan: Plan) -> tuple[Any, OriginalSettings]:
    """Return a configuration with a plan's settings, and what the script has set; without changes the same
    one.

    Args:
        source: complete, as a trainer is given it.
        plan: to apply.
    """
    record = OriginalSettings(
        per_device_train_batch_size=source.per_device_train_batch_size,
        gradient_accumulation_steps=source.gradient_accumulation_steps,
        gradient_checkpointing=checkpoints_activations(source),
    )
    if not plan:
        return source, record
    build = Build(plan=plan, source=source, made=copy.copy(source), record=record)
    for remedy in differing({}, plan):
        remedy.apply(build)
    return build.made, build.record


def check(trainer: Any, plan: Plan) -> Iterator[str]:
    """Pass on what the script has set since its trainer was built, and check that the plan is still in
    effect; yield a warning for what is in effect in part only.

    Raises:
        ConfigError: a setting is not in effect, for example because the script has set it again.
    """
    args = trainer.args
    if not plan or not hasattr(args, "per_device_train_batch_size"):
        return
    if ATTRIBUTE not in vars(args):
        raise ConfigError(
            f"{NO_EFFECT}: {type(trainer).__name__} has a configuration that it was not built with; give"
            f" {type(args).__name__} to its constructor"
        )
    source, values = vars(trainer).get(_GIVEN, (args, {}))
    for field, value in values.items():
        if getattr(source, field, None) is not value:
            setattr(args, field, getattr(source, field))
    record = record_of(args)
    for remedy in differing({}, plan):
        if (warning := remedy.check(plan, trainer, record)) is not None:
            yield warning
