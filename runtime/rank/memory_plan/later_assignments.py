"""Detect settings of a memory plan that a script sets again after it has built a configuration.

A plan is applied when the configuration is built, so it would not take effect, and the run would end. The choice of a fallback step reads from the
facts of a call that the micro-batch is not to be divided, or checkpointing not to be turned on (`facts.py`). `install` wraps `__setattr__` of
`transformers.TrainingArguments`; the assignment itself is left as it is.
"""

from __future__ import annotations

import sys
from typing import Any

from grpo_run.runtime.rank.memory_plan.settings import CHECKPOINTING

SIZES = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"})
ATTRIBUTE = "_grpo_run_set_later"
"""Attribute of a configuration of which such a setting was set later: the list of their names, which pickles as plain values."""
BUILDING = frozenset({"__init__", "__post_init__", "_apply"})
"""Functions that set them while a configuration is built; the last applies a plan (`configuration.py`)."""
_SETTINGS = SIZES | set(CHECKPOINTING)
_WATCHED = "_grpo_run_watched"


def install(arguments_class: Any) -> None:
    """Watch every configuration of `arguments_class` and its subclasses. A second call has no effect."""
    original = arguments_class.__setattr__
    if getattr(original, _WATCHED, False):
        return

    def assign(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if name in _SETTINGS and sys._getframe(1).f_code.co_name not in BUILDING:
            vars(self)[ATTRIBUTE] = [*_names(self), name]

    setattr(assign, _WATCHED, True)
    arguments_class.__setattr__ = assign


def size_is_set_later(configuration: Any) -> bool:
    """Whether a size of the batch was set after the configuration was built."""
    return not SIZES.isdisjoint(_names(configuration))


def checkpointing_is_set_later(configuration: Any) -> bool:
    """Whether gradient checkpointing was set after the configuration was built."""
    return not set(CHECKPOINTING).isdisjoint(_names(configuration))


def _names(configuration: Any) -> list[str]:
    names: list[str] = vars(configuration).get(ATTRIBUTE, [])
    return names
