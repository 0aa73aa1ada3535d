"""Apply a memory plan to the configurations that a script builds, and check that it stayed in effect.

`install` wraps `__post_init__` of `transformers.TrainingArguments`, which the configurations of all
trainers call first: TRL then derives the sizes of rollouts from what the plan has made of the batch. Values
are absolute. A configuration that is built from another one is not divided twice. Sizes alone do not tell,
because a script may halve its batch itself, in the same directory; two ways are recognized:

- `dataclasses.replace`: `install` notes the source and passes on the sizes that the script has set there,
  so that every size that the call names is the script's own, also if it equals a planned one.
- fields that are passed on, as `SFTTrainer` does with plain arguments: `mark` gives fields float objects of
  their own, with the same values. Another configuration with the same objects has got them from there.

Does not act on trainers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.rank.memory_plan.deepspeed import offload_optimizer
from grpo_run.runtime.rank.memory_plan.settings import (
    ATTRIBUTE,
    CHECKPOINTING,
    OriginalSettings,
    checkpoints_activations,
    original_settings,
    record_of,
    why_not_divided,
)

_MARKED = (
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "weight_decay",
    "label_smoothing_factor",
)
"""Fields of `TrainingArguments` with floats, which scripts seldom take from one configuration to set in another."""
_ENOUGH = 4
"""A script may take some from another configuration, and set some anew."""
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")


class Derivations:
    """The configurations that were built with a plan, and the one that `dataclasses.replace` copies at present."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, Mapping[str, float]]] = []
        self._replaced: Any = None

    def install(self, arguments_class: type) -> None:
        """Note the source of each configuration that `dataclasses.replace` builds."""
        original: Any = dataclasses.replace

        @functools.wraps(original)
        def replace(source: Any, /, **changes: Any) -> Any:
            if not isinstance(source, arguments_class) or ATTRIBUTE not in vars(source):
                return original(source, **changes)
            own = {name: value for name, value in original_settings(source).items() if name in _SIZES}
            self._replaced = source
            try:
                return original(source, **{**own, **changes})
            finally:
                self._replaced = None

        dataclasses.replace = replace

    def replaced(self) -> Any | None:
        """Return the configuration that `dataclasses.replace` copies to build the present one, once; None for none."""
        source, self._replaced = self._replaced, None
        return source

    def source(self, configuration: Any) -> Any | None:
        """Return the configuration whose fields have been passed on to this one; None for none."""
        for earlier, marks in reversed(self._made):
            if sum(getattr(configuration, name, None) is mark for name, mark in marks.items()) >= _ENOUGH:
                return earlier
        return None

    def mark(self, configuration: Any) -> None:
        """Make a configuration that is complete known as a source."""
        marks = {}
        for name in _MARKED:
            value = getattr(configuration, name, None)
            if type(value) is float:
                marks[name] = float.fromhex(value.hex())  # a new object, of the same bits
                setattr(configuration, name, marks[name])
        self._made.append((configuration, marks))


STEPS = "steps_per_generation"
VLLM_SHARE, VLLM_SLEEP = "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"
FSDP_CHECKPOINTING = "FSDP_ACTIVATION_CHECKPOINTING"
"""Variable of accelerate. FSDP's own checkpointing excludes the setting of transformers."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    per_device: int
    accumulation: int
    steps_per_generation: int | None


def install(
    arguments_class: Any,
    plan: MemoryPlan,
    report: Callable[[Any, OriginalSettings], None] = lambda made, record: None,
) -> None:
    """Apply the plan to every new configuration of `arguments_class` and its subclasses.

    Args:
        report: called with each configuration that the plan has changed, and what the script had set.
    """
    original = arguments_class.__post_init__
    derivations = Derivations()
    derivations.install(arguments_class)

    @functools.wraps(original)
    def planned(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = _apply(self, plan, derivations)
        result = original(self, *args, **kwargs)
        record.keep(self)
        derivations.mark(self)
        report(self, record)
        return result

    arguments_class.__post_init__ = planned


def _apply(configuration: Any, plan: MemoryPlan, derivations: Derivations) -> OriginalSettings:
    """Change the settings of a configuration that is being built. Returns what the script has set."""
    replaced = derivations.replaced()  # has the sizes that the script has set
    earlier = replaced if replaced is not None else derivations.source(configuration)
    sizes = _script_sizes(configuration, None if replaced is not None else earlier)
    divisor = math.gcd(sizes.per_device, plan.micro_batch_divisor)
    refusal = why_not_divided(configuration) if plan.micro_batch_divisor > 1 else ""
    if refusal:
        divisor = 1
    before = record_of(configuration) if earlier is None else record_of(earlier)
    changes = _other_changes(configuration, plan)
    record = OriginalSettings(
        per_device_train_batch_size=sizes.per_device,
        gradient_accumulation_steps=sizes.accumulation,
        gradient_checkpointing=before.gradient_checkpointing,
        divided_by=divisor,
        not_divided=refusal,
        others=before.others or {name: getattr(configuration, name) for name in changes},
    )
    configuration.per_device_train_batch_size, configuration.gradient_accumulation_steps = record.divided
    if sizes.steps_per_generation is not None:
        configuration.steps_per_generation = sizes.steps_per_generation * divisor
    if plan.gradient_checkpointing and not _fsdp_checkpoints(configuration):
        setattr(configuration, next(name for name in CHECKPOINTING if hasattr(configuration, name)), True)
    for name, value in changes.items():
        setattr(configuration, name, value)
    return record


def _other_changes(configuration: Any, plan: MemoryPlan) -> dict[str, Any]:
    """Return the further settings that the plan changes in this configuration, by name."""
    changes: dict[str, Any] = {}
    if plan.vllm_gpu_memory_utilization is not None and hasattr(configuration, VLLM_SHARE):
        changes[VLLM_SHARE] = plan.vllm_gpu_memory_utilization
    if plan.vllm_sleep and hasattr(configuration, VLLM_SLEEP):
        changes[VLLM_SLEEP] = True
    if plan.optimizer_offload:
        changes |= offload_optimizer(configuration)
    return changes


def _script_sizes(configuration: Any, earlier: Any | None) -> _Sizes:
    """Return the sizes as the script has set them; those that are taken from an earlier configuration as it had set them there."""
    sizes = _Sizes(
        per_device=configuration.per_device_train_batch_size,
        accumulation=configuration.gradient_accumulation_steps,
        steps_per_generation=getattr(configuration, STEPS, None),
    )
    if earlier is None:
        return sizes
    record = record_of(earlier)
    per_device, accumulation = record.divided
    steps = sizes.steps_per_generation
    if steps is not None and steps == getattr(earlier, STEPS, None):
        steps //= record.divided_by
    return _Sizes(
        per_device=record.per_device_train_batch_size if sizes.per_device == per_device else sizes.per_device,
        accumulation=record.gradient_accumulation_steps
        if sizes.accumulation == accumulation
        else sizes.accumulation,
        steps_per_generation=steps,
    )


def _fsdp_checkpoints(configuration: Any) -> bool:
    options = getattr(configuration, "fsdp_config", None)
    if isinstance(options, dict) and options.get("activation_checkpointing"):
        return True
    return os.environ.get(FSDP_CHECKPOINTING, "").lower() in ("true", "1")


def check(trainer: Any, plan: MemoryPlan) -> str | None:
    """Check that the plan took effect on a trainer.

    Returns:
        A warning if the micro-batch is not, or cannot be, divided as often as the plan says; else None.

    Raises:
        ConfigError: a setting did not take effect, for example because the script has set it again.
    """
    args = trainer.args
    if not plan.changed or not hasattr(args, "per_device_train_batch_size"):
        return None
    name = type(trainer).__name__
    if ATTRIBUTE not in vars(args):
        raise ConfigError(
            f"the memory plan did not take effect: the configuration of {name} was not built in this process; build"
            f" {type(args).__name__} in the script"
        )
    record = record_of(args)
    found = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    if found != record.divided:
        raise ConfigError(
            f"the memory plan did not take effect: {name} has per_device_train_batch_size={found[0]} and"
            f" gradient_accumulation_steps={found[1]}, not {record.divided[0]} and {record.divided[1]}; set them when"
            f" {type(args).__name__} is built, not later"
        )
    if plan.gradient_checkpointing and not checkpoints_activations(args) and not _fsdp_checkpoints(args):
        raise ConfigError(
            f"the memory plan did not take effect: {name} has gradient checkpointing turned off; set it when"
            f" {type(args).__name__} is built, not later"
        )
    if record.not_divided:
        return (
            f"the memory plan divides the micro-batch by {plan.micro_batch_divisor}, but not that of {name}, whose update would"
            f" not be the same: {record.not_divided}"
        )
    if record.divided_by != plan.micro_batch_divisor:
        return (
            f"the memory plan divides the micro-batch by {plan.micro_batch_divisor}, but {name} has"
            f" per_device_train_batch_size={record.per_device_train_batch_size}: divided by {record.divided_by}"
        )
    return None
