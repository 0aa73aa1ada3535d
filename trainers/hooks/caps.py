"""Caps on generation that override the script's own GRPO or RLOO configuration.

`parse` reads `--generation KEY=VALUE` for the command line, `install` applies the caps when a configuration
is built (before TRL validates it), and `check` verifies them on the trainer. Does not generate.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_run.runtime.errors import ConfigError

FIELDS: dict[str, type] = {"max_completion_length": int, "repetition_penalty": float}
"""Caps that are fields of TRL's configuration classes."""
KEYWORDS: dict[str, type] = {"no_repeat_ngram_size": int, "max_time": float}
"""Caps that TRL passes to transformers' `GenerationConfig` through `generation_kwargs`. vLLM supports
neither."""
KEYS = {**FIELDS, **KEYWORDS}
SYNONYMS = dict.fromkeys(
    ("max_tokens", "max_new_tokens", "max_length", "max_completion_tokens"), "max_completion_length"
)
"""Names that other libraries (vLLM, transformers, OpenAI) use for a cap, for the hint in the error."""


def parse(settings: Sequence[str]) -> dict[str, int | float]:
    """Parse `KEY=VALUE` settings.

    Raises:
        ConfigError: a key is unknown, or a value is not a positive number.
    """
    parsed: dict[str, int | float] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        key = key.strip()
        if not separator:
            raise ConfigError(f"--generation {setting}: expected KEY=VALUE")
        if key not in KEYS:
            near = [SYNONYMS[key]] if key in SYNONYMS else difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise ConfigError(f"--generation {key}: unknown cap; {hint}")
        try:
            value = KEYS[key](text)
        except ValueError:
            expected = "an integer" if KEYS[key] is int else "a number"
            raise ConfigError(f"--generation {key}={text}: expected {expected}") from None
        if not 0 < value < float("inf"):
            raise ConfigError(f"--generation {key}={text}: must be greater than 0 and finite")
        parsed[key] = value
    return parsed


def install(config_class: Any, caps: Mapping[str, int | float], journal: Callable[..., None]) -> None:
    """Apply the caps to every new configuration of `config_class` before it validates itself.

    Args:
        journal: called with the keyword arguments key, old, new and config for each cap that is applied.
    """
    original = config_class.__post_init__

    @functools.wraps(original)
    def capped(self: Any, *args: Any, **kwargs: Any) -> Any:
        for key, value in caps.items():
            if key in FIELDS:
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
        found = getattr(args, key) if key in FIELDS else (args.generation_kwargs or {}).get(key)
        if found != value:
            raise ConfigError(
                f"--generation {key}={value} did not take effect: {type(trainer).__name__} has {found}"
            )
