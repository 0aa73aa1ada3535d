"""Read single evidence files of an incident; a missing or damaged file gives an empty value.

Called by `contents.py` and `contents.py`. The supervisor may have ended while it gathered evidence, so
a missing or truncated file is not an error; the page reports the gap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 4 * 1024 * 1024


def read_text(path: Path) -> str:
    """The first 4 MiB of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""  # was not gathered; the page reports it


def read_json(path: Path) -> Any:
    """The JSON value of a file; None if the file is missing or malformed."""
    try:
        return json.loads(read_text(path))
    except ValueError:
        return None


def read_events(path: Path, last: int) -> tuple[dict[str, Any], ...]:
    """The last `last` objects of a JSON Lines file; truncated lines are skipped."""
    events = []
    for line in read_text(path).splitlines()[-last:]:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            events.append(value)
    return tuple(events)


def read_sizes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file from /proc, in bytes."""
    sizes = {}
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdecimal():
            sizes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes


def files_by_rank(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """The files `rank<N><suffix>` of a folder, by rank."""
    if not folder.is_dir():
        return []
    named = [
        (path.name.removeprefix("rank").removesuffix(suffix), path) for path in folder.glob(f"rank*{suffix}")
    ]
    return sorted((int(number), path) for number, path in named if number.isdecimal())
