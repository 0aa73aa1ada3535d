"""Format values for the report: durations, sizes, times and JSON values.

Called by `facts.py`, `tables.py` and `page.py`. Returns plain text; the template engine escapes it. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from grpo_run.watchdog.size_text import size_text

MAX_FIELDS_CHARACTERS = 300
EVENT_ENVELOPE = frozenset({"time", "monotonic", "run", "attempt", "rank", "step", "event"})
"""Fields of a journal event that have a column of their own or are the same for every event."""


def duration(seconds: float | None) -> str:
    """`1.71 s` or `2.5 min`; empty if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def size(count: Any) -> str:
    """`512 MiB` or `7.7 GiB`; `unknown` for anything but an integer."""
    return size_text(count) if isinstance(count, int) else "unknown"


def utc_time(wall_seconds: float | None) -> str:
    """`2026-09-21 14:13:20 UTC`; empty if unknown."""
    if not wall_seconds:
        return ""
    return datetime.fromtimestamp(wall_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def relative_time(wall_seconds: Any, incident_at: float | None) -> str:
    """Seconds before or after the incident; the time of day if the incident's time is unknown."""
    if not isinstance(wall_seconds, (int, float)):
        return ""
    if incident_at is None:
        return datetime.fromtimestamp(wall_seconds, timezone.utc).strftime("%H:%M:%S")
    return f"{wall_seconds - incident_at:+.2f}".replace("-", "−")


def spaced(name: Any) -> str:
    """An identifier with spaces instead of underscores."""
    return str(name or "unknown").replace("_", " ")


def plain(value: Any) -> str:
    """A string as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def event_fields(event: Mapping[str, Any]) -> str:
    """The fields of a journal event that have no column of their own, as `key=value` pairs."""
    others = {key: value for key, value in event.items() if key not in EVENT_ENVELOPE and value is not None}
    text = "  ".join(f"{key}={plain(value)}" for key, value in others.items())
    return text if len(text) <= MAX_FIELDS_CHARACTERS else text[:MAX_FIELDS_CHARACTERS] + "…"
