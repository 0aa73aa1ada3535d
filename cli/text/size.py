"""Sizes as people read them. Called by the commands that list checkpoints, runs and what can be freed."""

from __future__ import annotations


def size_text(count: int) -> str:
    """Return a number of bytes in a binary unit, such as `1.4 GiB`."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
