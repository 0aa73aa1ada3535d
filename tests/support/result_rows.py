"""A file of results, one JSON object a line, that several workers append to. Used by the campaigns."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")


def append(row: Any, path: Path) -> None:
    """Append a row, which is a dataclass, to a file that several workers share."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path, kind: Callable[..., Row], key: Callable[[Row], Hashable]) -> list[Row]:
    """Return the last row of each key in a file.

    Args:
        path: of the file.
        kind: the rows' dataclass, whose sequences are tuples.
        key: what identifies a row.
    """
    found: dict[Hashable, Row] = {}
    for line in path.read_text().splitlines():
        fields = json.loads(line)
        row = kind(**{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()})
        found[key(row)] = row
    return list(found.values())
