"""Caps on generation that override the script's own GRPO or RLOO configuration.

`install` applies the caps when a configuration is built (before TRL validates it), and `check` verifies them on the
trainer. Caps of our own are not part of a configuration (`capping.py`). Does not generate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.caps.settings import FIELDS, OWN


def install(config_class: Any, caps: Mapping[str, int | float], journal: Callable[..., None]) -> None:
    """Apply the caps to every new configuration of `config_class` before it validates itself.

    Args:
        journal: called with the keyword arguments key, old, new and config for each cap that is applied.
    """
    original = config_class.__post_init__

    @functools.wraps(original)
    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for key, value in caps.items():
            if key in OWN:
                old = None
            elif key in FIELDS:
                old = getattr(self, key)
                setattr(self, key, value)
            else:
                if getattr(self, "use_vllm", False):
                    raise ConfigError(
                        f"--generation {key}: not supported by vLLM; remove the cap, or set use_vllm=False"
                    )
                keywords = dict(self.generation_kwargs or {})
                old = keywords.get(key)
                keywords[key] = value
                self.generation_kwargs = keywords
            journal(key=key, old=old, new=value, config=type(self).__name__)
        return original(self, *args, **kwargs)

    config_class.__post_init__ = capped


def check(trainer: Any, caps: Mapping[str, int | float]) -> None:
    """Check that the caps took effect on a trainer that generates.

    Raises:
        ConfigError: a cap did not take effect, for example because the script set the value again.
    """
    args = trainer.args
    if not hasattr(args, "max_completion_length") or not hasattr(args, "generation_kwargs"):
        return
    for key, value in caps.items():
        if key in OWN:
            continue
        found = getattr(args, key) if key in FIELDS else (args.generation_kwargs or {}).get(key)
        if found != value:
            raise ConfigError(
                f"--generation {key}={value} did not take effect: {type(trainer).__name__} has {found}"
            )
