"""A number of bytes as words. Used for sentences, advice and the terminal. Pure."""

from __future__ import annotations


def size_text(size_bytes: int) -> str:
    """Return a size as `300 bytes`, `640 MiB` or `7.7 GiB`."""
    if size_bytes >= 1 << 30:
        return f"{size_bytes / (1 << 30):.1f} GiB"
    return f"{size_bytes / (1 << 20):.0f} MiB" if size_bytes >= 1 << 20 else f"{size_bytes} bytes"
