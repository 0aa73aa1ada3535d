"""The options of caps: which there are, how they are given, and which capped completions leave the loss.

Imports nothing heavy: the command line parses with it. `_configuration.py` and `_capping.py` apply the caps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.watchdog.observation import LEAST_LOOP_TOKENS, USUAL_LOOP_TOKENS
from grpo_run.watchdog.text import did_you_mean

LENGTH = "max_completion_length"
"""The cap that is a field of TRL's configuration classes."""
OWN: dict[str, type] = {"repetition": int, "max_time": float}
"""Caps of our own: the window in tokens, and the seconds of one rollout."""
KEYS = {LENGTH: int, **OWN}
SYNONYMS = {
    **dict.fromkeys(("max_tokens", "max_new_tokens", "max_length", "max_completion_tokens"), LENGTH),
    **dict.fromkeys(("deadline", "timeout", "time"), "max_time"),
    **dict.fromkeys(("repetition_window", "loop", "loops"), "repetition"),
}
"""Other names for a cap, of vLLM, transformers and OpenAI among others, for the hint in the error."""
ENDS = ("length", "repetition", "deadline")
"""How a cap ends a completion."""


def parse_caps(settings: Sequence[str]) -> dict[str, int | float]:
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
            hint = did_you_mean(SYNONYMS.get(key, key), KEYS)
            raise ConfigError(f"--generation {key}: unknown cap; {hint}")
        try:
            value = KEYS[key](text)
        except ValueError:
            expected = "an integer" if KEYS[key] is int else "a number"
            raise ConfigError(f"--generation {key}={text}: expected {expected}") from None
        if not 0 < value < float("inf"):
            raise ConfigError(f"--generation {key}={text}: must be greater than 0 and finite")
        if key == "repetition" and value < LEAST_LOOP_TOKENS:
            raise ConfigError(
                f"--generation {key}={text}: the window must be at least {LEAST_LOOP_TOKENS} tokens;"
                f" {USUAL_LOOP_TOKENS} is usual"
            )
        parsed[key] = value
    return parsed


def _ends(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(word.strip() for word in text.split(","))


@dataclass(frozen=True, kw_only=True)
class CapsSettings:
    """The caps of a run, and which completions that they have ended leave baseline and loss.

    Raises:
        ConfigError: a cap does not end completions so.
    """

    NAME: ClassVar[str] = "caps"
    generation: dict[str, int | float] = option(
        dict, "--generation", group=OptionGroup.training, metavar="KEY=VALUE", repeated=True, read=parse_caps,
        most_used=True, changes_training=True,
        help=f"cap generation: {', '.join(KEYS)}; may be repeated",
    )  # fmt: skip
    masked_ends: tuple[str, ...] = option(
        ("repetition", "deadline"), "--mask-capped", group=OptionGroup.training, metavar="ENDS|none",
        read=_ends, changes_training=True,
        help=f"completions to leave out of baseline and loss, by how a cap has ended them: {', '.join(ENDS)}",
    )  # fmt: skip

    def __post_init__(self) -> None:
        unknown = [end for end in self.masked_ends if end not in ENDS]
        if unknown:
            raise ConfigError(f"--mask-capped {','.join(unknown)}: give none, or some of {', '.join(ENDS)}")


SETTINGS = CapsSettings
