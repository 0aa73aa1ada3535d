"""Durations and sizes in texts for users."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.text import duration_text, size_text, step_time_text

DAY = 86_400
DURATIONS = {
    -1: "0.0 s", 0.04: "0.0 s", 0.44: "0.4 s", 1: "1 s", 41.4: "41 s", 60: "60 s", 119.4: "119 s",
    119.6: "2 min", 360: "6 min", 3569: "59 min", 3571: "1 h", 3900: "1 h 5 min", 7200: "2 h",
    2 * DAY - 31: "47 h 59 min", 2 * DAY: "2 d", 51 * 3600: "2 d 3 h",
}  # fmt: skip
STEP_TIMES = {0.128: "0.13 s/step", 9.5: "9.50 s/step", 12.5: "12.5 s/step", 150.2: "150 s/step"}
SIZES = {
    0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 640 << 20: "640 MiB", 1023 << 20: "1023 MiB",
    (1 << 30) - 1: "1.0 GiB", (7 << 30) + (700 << 20): "7.7 GiB", 3 << 40: "3.0 TiB",
    5000 << 40: "5000.0 TiB",
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "text"), DURATIONS.items())
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    """Short ones are given in seconds."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), STEP_TIMES.items())
def test_a_step_time_is_given_in_seconds(seconds: float, text: str) -> None:
    """With three significant digits at most."""
    assert step_time_text(seconds) == text


@pytest.mark.parametrize(("size", "text"), SIZES.items())
def test_sizes_are_short(size: int, text: str) -> None:
    """In the unit in which they are below 1024."""
    assert size_text(size) == text
