"""File access for evidence: private files, the end of a long file, and sizes of files that may not exist."""

from __future__ import annotations

import os
from pathlib import Path

MAX_FILE_BYTES = 1024 * 1024
"""Size to which a text file of the evidence is cut; its end is kept."""


def write_private(path: Path, content: bytes) -> None:
    """Write a file with mode 0600, replacing its contents."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)


def read_end(path: Path, count: int) -> bytes:
    """Return the last `count` bytes of a file."""
    with open(path, "rb") as file:
        file.seek(max(0, file_size(path) - count))
        return file.read(count)


def file_size(path: Path) -> int:
    """Return the size in bytes; 0 if the file does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
