"""The caps on generation of a run: parse them, apply them to configurations, and check them.

Values come from `KEY=VALUE`, a recipe or code. Caps that are settings of TRL's or transformers' generation
override the script's GRPO or RLOO configuration: `install` applies them when a configuration is built,
before TRL validates it, and `check` verifies them on the trainer. The two of our own, `repetition` and
`max_time`, are not part of a configuration (`capping.py`). Imports nothing heavy: the command line parses
with it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.event import Event
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
    """Note why completions end, because the run has another cap."""

    def __post_init__(self) -> None:
        if self.repetition is not None and self.repetition < MIN_WINDOW:
            raise ConfigError(
                f"repetition={self.repetition}: the window must be at least {MIN_WINDOW} tokens"
            )
        if self.max_time is not None and not 0 < self.max_time < float("inf"):
            raise ConfigError(f"max_time={self.max_time}: must be greater than 0 and finite")

    @property
    def stops(self) -> bool:
        """Whether a cap of our own may end a completion."""
        return self.repetition is not None or self.max_time is not None

    def __bool__(self) -> bool:
        return self.stops or self.counting


def own_caps(caps: Mapping[str, int | float]) -> CapSettings:
    """Return the caps of our own among parsed ones."""
    window = caps.get("repetition")
    return CapSettings(
        repetition=None if window is None else int(window), max_time=caps.get("max_time"), counting=bool(caps)
    )


def settings_of(trainer: Any, caps: Mapping[str, int | float]) -> CapSettings:
    """Return the caps of our own on a trainer: those of the command line, then those of `apply`."""
    ours = own_caps(caps)
    applied = vars(trainer).get(APPLIED, CapSettings())
    return CapSettings(
        repetition=applied.repetition if ours.repetition is None else ours.repetition,
        max_time=applied.max_time if ours.max_time is None else ours.max_time,
        counting=ours.counting or bool(applied),
    )


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
class GenerationSettings:
    """The caps of a run, as they are given on the command line."""

    caps: dict[str, int | float] = option(
        dict, "--generation", group=OptionGroup.training, metavar="KEY=VALUE", repeated=True, read=parse,
        most_used=True, changes_training=True,
        help=f"cap generation: {', '.join(KEYS)}; may be repeated",
    )  # fmt: skip


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
            journal(GenerationCapped(rank=0, key=key, old=old, new=value, config=type(self).__name__))
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
