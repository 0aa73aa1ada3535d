"""Durations in texts for users: `0.4 s`, `41 s`, `6 min`, `1 h 5 min`, `2 d 3 h`."""

from __future__ import annotations

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
