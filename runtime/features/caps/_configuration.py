"""Caps on one trainer: those of its configuration, and our own, from the command line and from its script.

Caps that are settings of TRL's or transformers' generation override the script's GRPO or RLOO configuration:
`install` applies them when a configuration is built, before TRL validates it, and `check` verifies them on
the trainer. The two of our own, `repetition` and `max_time`, are not part of a configuration. Called by
`rank.py` and `script.py`. Imports nothing heavy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.event import Event
from grpo_run.runtime.features.caps.settings import LENGTH
from grpo_run.runtime.memory.script_settings import original_settings
from grpo_run.watchdog.observation import LEAST_LOOP_TOKENS

APPLIED = "_grpo_run_caps"
"""Attribute of a trainer: the `CapSettings` that its script has applied."""


@dataclass(frozen=True, kw_only=True)
class CapSettings:
    """The caps of our own on one trainer.

    Raises:
        ConfigError: a value is out of range.
    """

    repetition: int | None = None
    """A completion in a loop is ended when the loop has lasted about so many tokens."""
    max_time: float | None = None
    """A rollout is ended after so many seconds; all its turns count."""
    counting: bool = False
    """Note why completions end, because the run has another cap, or completions are shorter than the script
    has set."""

    def __post_init__(self) -> None:
        if self.repetition is not None and self.repetition < LEAST_LOOP_TOKENS:
            raise ConfigError(
                f"repetition={self.repetition}: the window must be at least {LEAST_LOOP_TOKENS} tokens"
            )
        if self.max_time is not None and not 0 < self.max_time < float("inf"):
            raise ConfigError(f"max_time={self.max_time}: must be greater than 0 and finite")

    @property
    def stops(self) -> bool:
        """Whether a cap of our own may end a completion."""
        return self.repetition is not None or self.max_time is not None

    def __bool__(self) -> bool:
        return self.stops or self.counting


def settings_of(trainer: Any, caps: Mapping[str, int | float]) -> CapSettings:
    """Return the caps of our own on a trainer: those of the command line, then those of `apply`.

    Args:
        trainer: None for a hand-written loop, which has those of the command line.
    """
    applied = getattr(trainer, APPLIED, CapSettings())
    window = caps.get("repetition", applied.repetition)
    return CapSettings(
        repetition=None if window is None else int(window),
        max_time=caps.get("max_time", applied.max_time),
        counting=bool(caps or applied or LENGTH in original_settings(trainer.args)),
    )


class GenerationCapped(Event, kw_only=True):
    """A cap was set in a configuration: what it was there, and what it is now."""

    key: str
    old: float | str | None
    new: float
    config: str


def install(config_class: Any, caps: Mapping[str, int | float], journal: Callable[[Event], None]) -> None:
    """Apply the caps to every new configuration of `config_class` before it validates itself.

    Args:
        journal: called with an event for each cap that is applied.
    """
    original = config_class.__post_init__

    @functools.wraps(original)
    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for key, value in caps.items():
            old = None
            if key == LENGTH:
                old = getattr(self, key)
                setattr(self, key, value)
            journal(GenerationCapped(rank=0, key=key, old=old, new=value, config=type(self).__name__))
        return original(self, *args, **kwargs)

    config_class.__post_init__ = capped


def check(trainer: Any, caps: Mapping[str, int | float]) -> None:
    """Check that the cap on length took effect on a trainer that generates.

    Raises:
        ConfigError: it did not, for example because the script set the value again.
    """
    args, value = trainer.args, caps.get(LENGTH)
    if value is None or not hasattr(args, LENGTH):
        return
    found = original_settings(args).get(LENGTH, getattr(args, LENGTH))  # a plan may have changed it since
    if found != value:
        raise ConfigError(
            f"--generation {LENGTH}={value} did not take effect: {type(trainer).__name__} has {found}"
        )
