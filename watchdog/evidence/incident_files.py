"""Incident directories: one per incident, with `verdict.json` and the evidence.

    incidents/0001-signal/  verdict.json  stacks/  memory/

Called by the incident investigation: created before evidence is collected (as `NNNN-collecting`) and renamed
to the cause once there is a verdict. Directories have mode 0700, files 0600. `write_private` and `read_end`
are for the files in them. Does not judge.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_run.watchdog.verdict import Verdict

COLLECTING = "collecting"


def open_incident(incidents: Path) -> Path:
    """Create the next incident's directory and return it."""
    numbers = [int(path.name[:4]) for path in incidents.iterdir() if path.name[:4].isdigit()]
    path = incidents / f"{max(numbers, default=0) + 1:04d}-{COLLECTING}"
    path.mkdir(mode=0o700)
    return path


def close_incident(path: Path, verdict: Verdict, missing: list[str]) -> Path:
    """Write the verdict, rename the directory to the cause, and return its new path.

    Args:
        missing: evidence that could not be collected, one sentence each.
    """
    record = {**verdict.as_json(), "missing_evidence": missing}
    descriptor = os.open(path / "verdict.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)  # ASCII, because messages may contain lone surrogates
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    named = path.with_name(f"{path.name[:4]}-{verdict.cause}")
    path.rename(named)
    return named


def read_verdict(folder: str | None) -> dict[str, Any]:
    """Return the contents of the `verdict.json` of an incident; empty if it has none that can be read.

    Args:
        folder: of the incident; None if the disk took no evidence.
    """
    if folder is None:
        return {}
    try:
        value = json.loads((Path(folder) / "verdict.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


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
