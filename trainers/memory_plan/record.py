"""What a script has set in a configuration that a memory plan has changed.

Kept as an attribute of the configuration, in plain values: transformers pickles the configuration into each checkpoint, which must
load without grpo-run. Read by everything that must see a trainer as its script has built it, as the recognition of `train()`
calls does.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

ATTRIBUTE = "_grpo_run_memory_plan"
"""Attribute of a configuration that a plan has changed."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """The values of a configuration before a plan changed it, and by what its micro-batch was divided."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    divided_by: int = 1

    def keep(self, configuration: Any) -> None:
        """Attach the record to a configuration."""
        setattr(configuration, ATTRIBUTE, asdict(self))


def record_of(configuration: Any) -> Record:
    """Return what the script has set in a configuration; its present values if no plan has changed it."""
    kept = vars(configuration).get(ATTRIBUTE)
    if kept is not None:
        return Record(**kept)
    return Record(
        per_device_train_batch_size=configuration.per_device_train_batch_size,
        gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        gradient_checkpointing=bool(getattr(configuration, "gradient_checkpointing", False)),
    )
