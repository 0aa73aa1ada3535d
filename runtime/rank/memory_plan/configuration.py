"""Apply a memory plan where a trainer is built, and check at `train()` that it stayed in effect.

`install` wraps the constructor of `transformers.Trainer` and of every subclass. The outermost constructor
that is given a configuration passes on a copy with the plan's settings, so TRL's trainers derive everything
from them, and the script's own configuration, which may be the source of others, stays as the script has set
it. Values are absolute. Without a plan nothing is copied; what the trainer was built with is noted in any
case (`settings.py`), because a setting that changes between there and `train()` is one that no plan can
change.

Called by `runtime/rank/hooks/attach.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.rank.memory_plan.deepspeed import follow_sizes, offload_optimizer
from grpo_run.runtime.rank.memory_plan.settings import (
    ATTRIBUTE,
    CHECKPOINTING,
    OriginalSettings,
    checkpoints_activations,
    record_of,
    why_not_divided,
)

STEPS = "steps_per_generation"
VLLM_SHARE, VLLM_SLEEP = "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"
FSDP_CHECKPOINTING = "FSDP_ACTIVATION_CHECKPOINTING"
"""Variable of accelerate. FSDP's own checkpointing excludes the setting of transformers."""
_GIVEN = "_grpo_run_given"
"""Attribute of a trainer: the script's configuration, and the values that it had when the trainer was
built.
"""


def install(
    trainer_class: Any,
    arguments_class: type,
    plan: MemoryPlan,
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
            if plan.changed:
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


def apply(source: Any, plan: MemoryPlan) -> tuple[Any, OriginalSettings]:
    """Return a configuration with a plan's settings, and what the script has set; without changes the same
    one.

    Args:
        source: complete, as a trainer is given it.
        plan: to apply.
    """
    original = OriginalSettings(
        per_device_train_batch_size=source.per_device_train_batch_size,
        gradient_accumulation_steps=source.gradient_accumulation_steps,
        gradient_checkpointing=checkpoints_activations(source),
    )
    if not plan.changed:
        return source, original
    made = copy.copy(source)
    refusal = why_not_divided(source) if plan.micro_batch_divisor > 1 else ""
    divisor = 1 if refusal else math.gcd(source.per_device_train_batch_size, plan.micro_batch_divisor)
    changes: dict[str, Any] = {}
    if plan.vllm_gpu_memory_utilization is not None and hasattr(source, VLLM_SHARE):
        changes[VLLM_SHARE] = plan.vllm_gpu_memory_utilization
    if plan.vllm_sleep and hasattr(source, VLLM_SLEEP):
        changes[VLLM_SLEEP] = True
    record = dataclasses.replace(
        original,
        divided_by=divisor,
        not_divided=refusal,
        others={name: getattr(source, name) for name in changes},
    )
    for name, value in changes.items():
        setattr(made, name, value)
    made.per_device_train_batch_size, made.gradient_accumulation_steps = record.divided
    if isinstance(steps := getattr(source, STEPS, None), int):
        setattr(made, STEPS, steps * divisor)
    if divisor > 1:
        follow_sizes(made)
    if plan.gradient_checkpointing and not _fsdp_checkpoints(source):
        for name in CHECKPOINTING:
            if hasattr(made, name):
                setattr(made, name, True)
    if plan.optimizer_offload:
        offload_optimizer(made)
    return made, record


def _fsdp_checkpoints(configuration: Any) -> bool:
    options = getattr(configuration, "fsdp_config", None)
    if isinstance(options, dict) and options.get("activation_checkpointing"):
        return True
    return os.environ.get(FSDP_CHECKPOINTING, "").lower() in ("true", "1")


def check(trainer: Any, plan: MemoryPlan) -> str | None:
    """Pass on what the script has set since its trainer was built, and check that the plan is still in
    effect.

    Returns:
        A warning if the micro-batch is not, or cannot be, divided as often as the plan says; else None.

    Raises:
        ConfigError: a setting is not in effect, for example because the script has set it again.
    """
    args = trainer.args
    if not plan.changed or not hasattr(args, "per_device_train_batch_size"):
        return None
    name = type(trainer).__name__
    if ATTRIBUTE not in vars(args):
        raise ConfigError(
            f"the memory plan did not take effect: {name} has a configuration that it was not built with;"
            f" give {type(args).__name__} to its constructor"
        )
    source, values = vars(trainer).get(_GIVEN, (args, {}))
    for field, value in values.items():
        if getattr(source, field, None) is not value:
            setattr(args, field, getattr(source, field))
    record = record_of(args)
    found = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if found != record.divided:
        raise ConfigError(
            f"the memory plan did not take effect: {name} has per_device_train_batch_size={found[0]} and"
            f" gradient_accumulation_steps={found[1]}, not {record.divided[0]} and {record.divided[1]}; set"
            f" them before {name} is built, not later"
        )
    if plan.gradient_checkpointing and not checkpoints_activations(args) and not _fsdp_checkpoints(args):
        raise ConfigError(
            f"the memory plan did not take effect: {name} has gradient checkpointing turned off; set it"
            f" before {name} is built, not later"
        )
    if record.not_divided:
        return (
            f"the memory plan divides the micro-batch by {plan.micro_batch_divisor}, but not that of {name},"
            f" whose update would not be the same: {record.not_divided}"
        )
    if record.divided_by != plan.micro_batch_divisor:
        return (
            f"the memory plan divides the micro-batch by {plan.micro_batch_divisor}, but {name} has"
            f" per_device_train_batch_size={record.per_device_train_batch_size}: divided by"
            f" {record.divided_by}"
        )
    return None
