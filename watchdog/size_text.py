"""Byte counts as text for messages, tables and the report. Pure."""

from __future__ import annotations

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
