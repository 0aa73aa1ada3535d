"""The script's own settings in a configuration that a memory plan has changed.

Kept as an attribute of the configuration, in plain values: transformers pickles the configuration into each checkpoint, which must
load without grpo-run. Read by everything that must see a trainer as its script has built it, as the recognition of `train()`
calls does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ATTRIBUTE = "_grpo_run_memory_plan"
"""Attribute of a configuration that a plan has changed."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""Names of one setting, the one that counts first; transformers before 5.20 has the second only."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The values of a configuration before a plan changed it, and by what its micro-batch was divided."""

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


def record_of(configuration: Any) -> Record:
    """Return what the script has set in a configuration; its present values if no plan has changed it."""
    kept = vars(configuration).get(ATTRIBUTE)
    if kept is not None:
        return Record(**kept)
    return Record(
        per_device_train_batch_size=configuration.per_device_train_batch_size,
        gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        gradient_checkpointing=checkpoints_activations(configuration),
    )


def checkpoints_activations(configuration: Any) -> bool:
    """Whether gradient checkpointing is turned on in a configuration, which may not have resolved its names yet."""
    values = (getattr(configuration, name, None) for name in CHECKPOINTING)
    return bool(next((value for value in values if value is not None), False))


def original_settings(configuration: Any) -> dict[str, Any]:
    """Return the settings that a plan changes, with the values that the script has set, by name; empty without a plan."""
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
