"""Parses `--guard NAME=RESPONSE[:LIMIT]` of the command line and of recipes. Decides nothing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence

from grpo_run.runtime.errors import ConfigError
from grpo_run.watchdog.learning_rules import FRACTIONS, LIMITS, GuardResponse, LearningGuard, Rules

GRAMMAR = "NAME=RESPONSE[:LIMIT]"


def parse_guards(settings: Sequence[str]) -> Rules:
    """Parse the settings of guards; a later one of the same guard wins.

    Raises:
        ConfigError: a name, a response or a limit is wrong.
    """
    responses: dict[LearningGuard, GuardResponse] = {}
    limits: dict[LearningGuard, float] = {}
    for setting in settings:
        name, separator, rest = setting.partition("=")
        if not separator:
            raise ConfigError(f"--guard {setting}: expected {GRAMMAR}")
        guard = LearningGuard(
            _known(name.strip().replace("_", "-"), [str(one) for one in LearningGuard], setting, "guard")
        )
        text, limited, limit = rest.partition(":")
        response = text.strip().replace("_", "-")
        responses[guard] = GuardResponse(
            _known(response, [str(one) for one in GuardResponse], setting, "response")
        )
        limits.pop(guard, None)
        if limited:
            limits[guard] = _limit(guard, limit, setting)
    return Rules(responses=responses, limits=limits)


def _known(word: str, known: list[str], setting: str, what: str) -> str:
    if word in known:
        return word
    near = difflib.get_close_matches(word, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise ConfigError(f"--guard {setting}: unknown {what} {word!r}; {hint}")


def _limit(guard: LearningGuard, text: str, setting: str) -> float:
    if guard not in LIMITS:
        raise ConfigError(f"--guard {setting}: {guard} has no limit")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--guard {setting}: the limit is the {LIMITS[guard]}, which must be a number above 0"
        )
    if guard in FRACTIONS and value >= 1:
        raise ConfigError(f"--guard {setting}: the limit is the {LIMITS[guard]}, which must be below 1")
    if guard is LearningGuard.zero_variance and value % 1:
        raise ConfigError(
            f"--guard {setting}: the limit is the number of {LIMITS[guard]}, which must be a whole number"
        )
    return value
