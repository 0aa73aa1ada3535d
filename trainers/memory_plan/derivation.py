"""Tell from which configuration another one was built, so that a memory plan does not divide its batch twice.

Sizes alone do not tell: a script may halve its batch itself, in the same directory. Called by `configuration.py`, which decides
what follows. Two ways to derive a configuration are known:

- `dataclasses.replace`: `install` notes the source, and passes on the sizes that the script has set there, so that every size
  that the call names is the script's own, also if it equals a planned one;
- fields that are passed on, as `SFTTrainer` does with plain arguments: `mark` gives fields float objects of their own, with the
  same values. Another configuration that has the same objects has got them from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from grpo_run.trainers.memory_plan.record import ATTRIBUTE, original_settings

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
