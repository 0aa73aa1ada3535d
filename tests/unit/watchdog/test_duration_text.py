"""Durations in texts for users."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.text import duration_text, step_time_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (0.44, "0.4 s"),
        (1, "1 s"),
        (41.4, "41 s"),
        (60, "60 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (360, "6 min"),
        (3569, "59 min"),
        (3571, "1 h"),
        (3900, "1 h 5 min"),
        (7200, "2 h"),
        (2 * 86_400 - 31, "47 h 59 min"),
        (2 * 86_400, "2 d"),
        (51 * 3600, "2 d 3 h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    """Short ones are given in seconds."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.128, "0.13 s/step"), (9.5, "9.50 s/step"), (12.5, "12.5 s/step"), (150.2, "150 s/step")],
)
def test_a_step_time_is_given_in_seconds(seconds: float, text: str) -> None:
    """With three significant digits at most."""
    assert step_time_text(seconds) == text
