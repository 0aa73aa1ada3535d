"""Sizes as words."""

from __future__ import annotations

from grpo_run.watchdog.size_text import size_text


def test_sizes_are_short() -> None:
    """Bytes, MiB, and GiB from 1 GiB on."""
    sizes = (300, 640 << 20, 1023 << 20, 1 << 30, (7 << 30) + (700 << 20))
    assert [size_text(size) for size in sizes] == ["300 bytes", "640 MiB", "1023 MiB", "1.0 GiB", "7.7 GiB"]
