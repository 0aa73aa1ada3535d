"""Sizes as words."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.text import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (640 << 20, "640 MiB"),
        (1023 << 20, "1023 MiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        ((7 << 30) + (700 << 20), "7.7 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_sizes_are_short(size: int, text: str) -> None:
    """In the unit in which they are below 1024."""
    assert size_text(size) == text
