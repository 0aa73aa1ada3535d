"""What a script calls: caps from code, also without `grpo-run launch`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.caps._configuration import APPLIED, CapSettings
from grpo_run.runtime.rank.session import current

_HOOKS = "_grpo_run_caps_hooks"
"""Attribute of a trainer whose script has capped it without `grpo-run launch`: an open `ExitStack`."""


def apply(trainer: Any, *, repetition: int | None, max_time: float | None) -> None:
    """Cap a trainer: now, or when it trains under `grpo-run launch`. See `grpo_run.trainers.caps.apply`."""
    from grpo_run.runtime.features.caps._capping import Capping

    settings = CapSettings(repetition=repetition, max_time=max_time)
    if APPLIED in vars(trainer):
        raise ConfigError("caps.apply was called twice for one trainer: give all caps in one call")
    capping = Capping(trainer, settings)
    setattr(trainer, APPLIED, settings)
    if current() is None:
        hooks = ExitStack()
        hooks.enter_context(capping.applied())
        setattr(trainer, _HOOKS, hooks)
