"""What a script has set of a trainer's configuration, whatever it was built with, and why its micro-batch
must not be divided.

`settings_of` and `why_not_divided` judge loss and batch from a configuration alone, where a trainer is about
to be built. A script with several stages has one plan: the stage that ran out of memory may be split,
while the loss of another may not allow it.

`OriginalSettings` keeps what the script had set when a trainer was built, as an attribute of its
configuration in plain values, because transformers pickles that into each checkpoint, which must load
without grpo-run. Everything that must see a trainer as its script has built it reads it, such as the
recognition of `train()` calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_run.runtime.memory import deepspeed
from grpo_run.runtime.memory.facts import MemoryFacts, split_refusals
from grpo_run.runtime.upstream.trainer_kinds import configuration_kind


def settings_of(arguments: Any) -> dict[str, Any]:
    """Return the fields of `MemoryFacts` that depend on a trainer's arguments alone."""
    loss_type = getattr(arguments, "loss_type", None)
    return {
        "drop_last": bool(getattr(arguments, "dataloader_drop_last", False)),
        "explicit_sizes": tuple(_explicit_sizes(arguments)),
        "loss_type": loss_type if loss_type is None or isinstance(loss_type, str) else str(loss_type),
        "entropy_bonus": bool(
            getattr(arguments, "entropy_coef", 0.0) or getattr(arguments, "use_adaptive_entropy", False)
        ),
        "top_entropy_quantile": float(getattr(arguments, "top_entropy_quantile", 1.0)),
        "averages_tokens_across_ranks": bool(getattr(arguments, "average_tokens_across_devices", True)),
    }


def why_not_divided(arguments: Any) -> str:
    """Return why the micro-batch of a configuration is not to be divided, as a clause; empty if it may be.

    Args:
        arguments: the configuration, which may not have validated itself yet.
    """
    facts = MemoryFacts(
        trainer_class=type(arguments).__name__,
        trainer=configuration_kind(type(arguments)),
        world_size=1,
        layout="",
        per_device_train_batch_size=max(1, arguments.per_device_train_batch_size),
        gradient_accumulation_steps=max(1, arguments.gradient_accumulation_steps),
        counts_tokens=True,  # only the trainer knows
        **settings_of(arguments),
    )
    return "; ".join(split_refusals(facts))


def _explicit_sizes(arguments: Any) -> Iterator[str]:
    """Yield the settings, beside the arguments' own, that fix the sizes of a batch."""
    yield from deepspeed.explicit_sizes(arguments)
    if getattr(arguments, "auto_find_batch_size", False):
        yield "auto_find_batch_size"
    rollout, steps = (
        getattr(arguments, name, None) for name in ("generation_batch_size", "steps_per_generation")
    )
    per_step = arguments.per_device_train_batch_size
    if (
        isinstance(rollout, int)
        and isinstance(steps, int)
        and rollout != per_step * arguments.world_size * steps
    ):
        # TRL has derived the rollout from a size that the script has set again
        yield f"an assignment after {type(arguments).__name__} was built"


ATTRIBUTE = "_grpo_run_script_settings"
"""Attribute of a configuration that a trainer was built with."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Names of one setting, the one that counts first; transformers before 5.20 has the second only."""


@dataclass(frozen=True, kw_only=True)
class OriginalSettings:
    """The values of a configuration when a trainer was built with it, and by what a plan has divided its
    micro-batch.
    """

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    divided_by: int = 1
    not_divided: str = ""
    """Why the micro-batch is not divided although the plan says so, as a clause."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further settings that the plan has changed, by name."""

    def keep(self, configuration: Any) -> None:
        """Attach the record to a configuration."""
        setattr(configuration, ATTRIBUTE, asdict(self))

    @property
    def divided(self) -> tuple[int, int]:
        """The planned `per_device_train_batch_size` and `gradient_accumulation_steps`."""
        return (
            self.per_device_train_batch_size // self.divided_by,
            self.gradient_accumulation_steps * self.divided_by,
        )


def record_of(configuration: Any) -> OriginalSettings:
    """Return what the script has set in a configuration; its present values if no trainer was built with
    it.
    """
    kept = vars(configuration).get(ATTRIBUTE)
    if kept is not None:
        return OriginalSettings(**kept)
    return OriginalSettings(
        per_device_train_batch_size=configuration.per_device_train_batch_size,
        gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        gradient_checkpointing=checkpoints_activations(configuration),
    )


def set_later(configuration: Any) -> tuple[str, bool]:
    """Return what sets sizes after, or apart from, the configuration that a trainer is given, and whether
    checkpointing is.

    Returns:
        A noun with a place for the name of the trainer, empty if the sizes are those that it was built with;
        and whether gradient checkpointing is not.
    """
    if ATTRIBUTE not in vars(configuration):
        return "{trainer} itself, which was given no configuration", True
    record = record_of(configuration)
    sizes = (configuration.per_device_train_batch_size, configuration.gradient_accumulation_steps)
    later = "" if sizes == record.divided else "an assignment after {trainer} was built"
    return later, record.gradient_checkpointing and not checkpoints_activations(configuration)


def checkpoints_activations(configuration: Any) -> bool:
    """Whether gradient checkpointing is turned on in a configuration, which may not have resolved its names
    yet.
    """
    values = (getattr(configuration, name, None) for name in CHECKPOINTING)
    return bool(next((value for value in values if value is not None), False))


def original_settings(configuration: Any) -> dict[str, Any]:
    """Return the settings that plans change, with the values that the script has set, by name; empty without
    a record.
    """
    if ATTRIBUTE not in vars(configuration):
        return {}
    record = record_of(configuration)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": record.per_device_train_batch_size,
        "gradient_accumulation_steps": record.gradient_accumulation_steps,
    }
    steps = getattr(configuration, "steps_per_generation", None)
    if steps is not None:
        settings["steps_per_generation"] = steps // record.divided_by
    for name in CHECKPOINTING:
        if hasattr(configuration, name):
            settings[name] = record.gradient_checkpointing
    return {**settings, **record.others}
