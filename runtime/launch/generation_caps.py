"""The caps on generation that `--generation` takes, and how it is parsed.

Imports nothing heavy: the command line parses with it. The caps are applied by a feature.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option

FIELDS: dict[str, type] = {"max_completion_length": int, "repetition_penalty": float}
"""Caps that are fields of TRL's configuration classes."""
KEYWORDS: dict[str, type] = {"no_repeat_ngram_size": int}
"""Caps that TRL passes to transformers' `GenerationConfig` through `generation_kwargs`. vLLM does not support
it.
"""
OWN: dict[str, type] = {"repetition": int, "max_time": float}
"""Caps of our own: the window in tokens, and the seconds of one rollout."""
KEYS = {**FIELDS, **KEYWORDS, **OWN}
SYNONYMS = {
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_length", "max_completion_tokens"), "max_completion_length"
    ),
    **dict.fromkeys(("deadline", "timeout", "time"), "max_time"),
    **dict.fromkeys(("repetition_window", "loop", "loops"), "repetition"),
}
"""Other names for a cap, of vLLM, transformers and OpenAI among others, for the hint in the error."""
MIN_WINDOW = 8
"""Tokens. A shorter window would end lists of equal numbers and rows of dashes."""
DEFAULT_WINDOW = 128
"""Tokens. At 64, tables and markup of real text were taken for loops in 0.7 % of samples; at 128 in 0.07
%.
"""


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
        if key == "repetition" and value < MIN_WINDOW:
            raise ConfigError(
                f"--generation {key}={text}: the window must be at least {MIN_WINDOW} tokens;"
                f" {DEFAULT_WINDOW} is usual"
            )
        parsed[key] = value
    return parsed


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The caps of a run, as they are given on the command line."""

    caps: dict[str, int | float] = option(
        dict, "--generation", group=OptionGroup.training, metavar="KEY=VALUE", repeated=True, read=parse,
        most_used=True, changes_training=True,
        help=f"cap generation: {', '.join(KEYS)}; may be repeated",
    )  # fmt: skip
