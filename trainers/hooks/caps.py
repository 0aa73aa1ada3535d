"""Caps on generation, laid over the script's own GRPO or RLOO configuration.

`--generation KEY=VALUE` is parsed here for the command line, applied here when the configuration is built
(before TRL checks it), and checked here once the trainer exists. Does not generate.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_run.runtime.errors import ConfigError

FIELDS: dict[str, type] = {"max_completion_length": int, "repetition_penalty": float}
"""Fields of TRL's configurations."""
KEYWORDS: dict[str, type] = {"no_repeat_ngram_size": int, "max_time": float}
"""What TRL passes on through `generation_kwargs` to transformers' GenerationConfig; vLLM knows neither."""
KEYS = {**FIELDS, **KEYWORDS}
SYNONYMS = dict.fromkeys(
    ("max_tokens", "max_new_tokens", "max_length", "max_completion_tokens"), "max_completion_length"
)
"""Names of a cap in other libraries (vLLM, transformers, OpenAI), for the hint."""


def parse(settings: Sequence[str]) -> dict[str, int | float]:
    """Read `KEY=VALUE` settings.

    Raises:
        ConfigError: an unknown key (with the nearest one), or a value that is not a positive number.
    """
    parsed: dict[str, int | float] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        key = key.strip()
        if not separator:
            raise ConfigError(f"--generation {setting}: write KEY=VALUE")
        if key not in KEYS:
            near = [SYNONYMS[key]] if key in SYNONYMS else difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(KEYS)}"
            raise ConfigError(f"--generation {key}: no such cap; {hint}")
        try:
            value = KEYS[key](text)
        except ValueError:
            raise ConfigError(f"--generation {key}={text}: wants {KEYS[key].__name__}") from None
        if not 0 < value < float("inf"):
            raise ConfigError(f"--generation {key}={text}: must be above 0 and finite")
        parsed[key] = value
    return parsed


def install(config_class: Any, caps: Mapping[str, int | float], journal: Callable[..., None]) -> None:
    """Make every configuration of `config_class` (and subclasses) take the caps before its own checks.

    Args:
        journal: called as (key=, old=, new=, config=) once a cap is laid.
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
                        f"--generation {key}: vLLM has no such setting; leave it out or use_vllm=False"
                    )
                keywords = dict(self.generation_kwargs or {})
                old = keywords.get(key)
                keywords[key] = value
                self.generation_kwargs = keywords
            journal(key=key, old=old, new=value, config=type(self).__name__)
        return original(self, *args, **kwargs)

    config_class.__post_init__ = capped


def check(trainer: Any, caps: Mapping[str, int | float]) -> None:
    """See that a trainer which generates really got the caps.

    Raises:
        ConfigError: it did not; a cap that is believed in and absent is worse than none.
    """
    args = trainer.args
    if not hasattr(args, "max_completion_length") or not hasattr(args, "generation_kwargs"):
        return
    for key, value in caps.items():
        found = getattr(args, key) if key in FIELDS else (args.generation_kwargs or {}).get(key)
        if found != value:
            raise ConfigError(
                f"--generation {key}={value} did not reach {type(trainer).__name__}: it has {found}"
            )
