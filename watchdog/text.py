"""Words for users: durations, byte counts, names of ranks, and names of callbacks and tools.

Durations read `0.4 s`, `6 min` or `2 d 3 h`; ranks read `rank 1` or `ranks 0 to 6 and 9`. The names of
callbacks, tools and rewards are also the keys under which their durations are recorded: the hooks of a rank
(`runtime/rank/hooks/`) write them to the board, and sentences show them. Called wherever a message, table
or report is built. `TextEnum` is the base of enumerations that users read. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum


class TextEnum(str, Enum):
    """An enumeration of texts: a member reads as its value."""

    def __str__(self) -> str:
        return str.__str__(self)


MINUTE_SECONDS, HOUR_SECONDS, DAY_SECONDS = 60, 3600, 86_400
MINUTES_FROM_SECONDS = 2 * MINUTE_SECONDS
"""Shorter durations are given in seconds: `90 s` says more than `2 min`."""
DAYS_FROM_SECONDS = 2 * DAY_SECONDS


def duration_text(seconds: float) -> str:
    """Return a duration in at most two units, rounded to what a reader needs.

    Args:
        seconds: finite; less than 0 counts as 0.
    """
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{seconds:.1f} s"
    if seconds < MINUTES_FROM_SECONDS - 0.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / MINUTE_SECONDS)
    if minutes < HOUR_SECONDS // MINUTE_SECONDS:
        return f"{minutes} min"
    if seconds < DAYS_FROM_SECONDS:
        return _two_units(minutes, 60, "h", "min")
    return _two_units(round(seconds / HOUR_SECONDS), 24, "d", "h")


def step_time_text(seconds: float) -> str:
    """Return the duration of a step, always in seconds: `0.13 s/step`, `12.5 s/step`, `150 s/step`."""
    digits = 2 if seconds < 10 else 1 if seconds < 100 else 0
    return f"{seconds:.{digits}f} s/step"


def _two_units(number: int, factor: int, large: str, small: str) -> str:
    whole, rest = divmod(number, factor)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"


_UNITS = ("KiB", "MiB", "GiB", "TiB")
_WHOLE = ("KiB", "MiB")
_SHORT = 10
"""Below, these have a decimal too."""
_NEXT = 1023.95
"""What would be printed as 1024.0 is 1 of the next unit."""


def size_text(size_bytes: int) -> str:
    """Return a size as `300 bytes`, `1.5 KiB`, `640 MiB`, `7.7 GiB` or `3.0 TiB`."""
    if size_bytes < 1 << 10:
        return f"{size_bytes} bytes"
    value, units = size_bytes / 1024, list(_UNITS)
    while value >= _NEXT and len(units) > 1:
        value /= 1024
        del units[0]
    decimals = 0 if units[0] in _WHOLE and value >= _SHORT else 1
    return f"{value:.{decimals}f} {units[0]}"


MIN_RANGE = 4
"""Shortest run of consecutive ranks that is written as a range."""


def rank_names(ranks: Iterable[int], *, capitalize: bool = False, ranges: bool = True) -> str:
    """Return the ranks as words, in ascending order.

    Args:
        capitalize: for the beginning of a sentence.
        ranges: write four or more consecutive ranks as a range: `ranks 0 to 6`.
    """
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs:
        if ranges and len(run) >= MIN_RANGE:
            words.append(f"{run[0]} to {run[-1]}")
        else:
            words.extend(map(str, run))
    noun = "rank" if len(ordered) == 1 else "ranks"
    return f"{noun.capitalize() if capitalize else noun} {join_words(words)}"


def join_words(words: Iterable[str], *, last: str = "and") -> str:
    """Join words or clauses: `a`, `a and b`, `a, b and c`.

    Args:
        last: stands before the last one: `and` or `or`.
    """
    listed = list(words)
    return f" {last} ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def counted(number: int, noun: str) -> str:
    """Return `1 rank` or `2 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the known word that is nearest, as a question; else all of them, or what to say instead."""
    names = list(known)
    near = difflib.get_close_matches(word, names, 1)
    return f"did you mean {near[0]}?" if near else otherwise or f"known: {', '.join(names)}"


_TOOL = "tool "
_RESET = "reset of "
_BOOT = "boot of "
_REWARD = "get_reward of "


def tool_name(function: str) -> str:
    """Return the name of a tool of an agent."""
    return f"{_TOOL}{function}"


def reset_name(environment: str) -> str:
    """Return the name of `reset` of an environment's class."""
    return f"{_RESET}{environment}"


def boot_name(environment: str) -> str:
    """Return the name of the call that makes an environment."""
    return f"{_BOOT}{environment}"


def reward_name(environment: str) -> str:
    """Return the name of `get_reward` of an environment's class."""
    return f"{_REWARD}{environment}"


def is_of_agent(name: str) -> bool:
    """Whether a name on the board is that of a tool, or of what TRL calls of an environment."""
    return name.startswith((_TOOL, _RESET, _BOOT, _REWARD))


def place_name(name: str) -> str:
    """Return what a sentence calls the code: `callback Log.on_step_end`, `tool search`."""
    return name if is_of_agent(name) else f"callback {name}"
