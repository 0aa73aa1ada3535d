"""The facts at the top of the report (cause, culprit, source line, action, result), formatted as text.

Called by `incident_page.py`. Turns `verdict.json` and the journal's records of the incident into values for
the template, and formats durations, sizes, times and JSON values as plain text, which the template engine
escapes. Pure; does not read files (`incident_contents.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from grpo_run.runtime.history.recovery import Recovery
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.shortage import described_in
from grpo_run.watchdog.text import rank_names, size_text

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


def relative_time(wall_seconds: Any, fault: Recovery | None) -> str:
    """Seconds before or after the fault; the time of day if the fault's time is unknown."""
    if not isinstance(wall_seconds, (int, float)):
        return ""
    if fault is None:
        return datetime.fromtimestamp(wall_seconds, timezone.utc).strftime("%H:%M:%S")
    return f"{wall_seconds - fault.at:+.2f}".replace("-", "−")


def seconds_before(seconds: float) -> str:
    """`34.9 s before` from a negative number of seconds."""
    return f"{duration(-seconds)} before"


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


STUCK = frozenset(
    {Cause.generation_stall, Cause.reward_stall, Cause.data_stall, Cause.checkpoint_stall, Cause.no_progress}
)
CONFIDENCE = {
    "proved": "records or thread states of the ranks show the cause",
    "deadline": "a deadline passed; nothing proves the cause",
    "inferred": "the cause itself was not observed",
    "unknown": "too little was observed",
}


def ranks_in(value: Any) -> tuple[int, ...]:
    """The integers of a JSON list; empty for any other value."""
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def facts_of(verdict: Mapping[str, Any], recovery: Recovery | None) -> list[dict[str, Any]]:
    """The known facts, in the order of the page: name, lines, and whether these are code; none without a
    verdict.
    """
    if not verdict:
        return []
    culprits, waiters = ranks_in(verdict.get("culprits")), ranks_in(verdict.get("waiters"))
    location, mismatch = verdict.get("location"), verdict.get("mismatch")
    places = (_place(location),) if isinstance(location, Mapping) else _places(culprits, verdict)
    waiting, repeated = _places(waiters, verdict), recovery.lost_steps if recovery else None
    rows = (
        _fact("Cause", str(verdict.get("cause") or "unknown"), code=True),
        _fact("Culprit", rank_names(culprits) if culprits else "no rank of this node is named"),
        _fact("Step and phase", _step_and_phase(verdict)),
        _fact("Source line", *places, code=True),
        _fact("Confidence", _confidence(verdict)),
        _fact("Memory", described_in(verdict)),
        _fact("Mismatch", plain(mismatch) if mismatch else "", code=True),
        _fact("Waiting", *(waiting or [rank_names(waiters) if waiters else ""]), code=bool(waiting)),
        _fact("Action taken", _action(recovery)),
        _fact("Time to detect", duration(recovery.detection_seconds) if recovery else ""),
        _fact("Time to recover", duration(recovery.recovery_seconds) if recovery else ""),
        _fact("Repeated steps", "" if repeated is None else str(repeated)),
        _fact("Not resumed", recovery.mismatch if recovery else ""),
        _fact("Tried before", *map(str, verdict.get("tried") or ())),
    )
    return [fact for fact in rows if fact["lines"]]


def _fact(name: str, *lines: str, code: bool = False) -> dict[str, Any]:
    return {"name": name, "lines": list(filter(None, lines)), "code": code}


def plain_title(verdict: Mapping[str, Any]) -> str:
    """`Rank 1 is stuck in ask, train.py:19, reward` for a rank that is stuck in its own code; empty for other
    faults.
    """
    culprits, location = ranks_in(verdict.get("culprits")), verdict.get("location")
    stuck = str(verdict.get("cause")) in STUCK
    if not stuck or len(culprits) != 1 or not isinstance(location, Mapping):
        return ""
    file = str(location.get("file")).rpartition("/")[2]
    phase = f", {verdict['phase']}" if verdict.get("phase") else ""
    return f"Rank {culprits[0]} is stuck in {location.get('function')}, {file}:{location.get('line')}{phase}"


def tags_of(verdict: Mapping[str, Any], recovery: Recovery | None) -> list[dict[str, Any]]:
    """Cause, confidence and result, in words below the headline; none without a verdict. `alarm` draws a word
    in the alarm color.
    """
    if not verdict:
        return []
    recovered = recovery is not None and recovery.recovery_seconds is not None
    action = spaced(recovery.action) if recovery and recovery.action else "result unknown"
    return [
        {"text": spaced(verdict.get("cause")), "alarm": True},
        {"text": str(verdict.get("confidence") or "confidence unknown"), "alarm": False},
        {"text": "recovered" if recovered else action, "alarm": not recovered},
    ]


def _step_and_phase(verdict: Mapping[str, Any]) -> str:
    step, phase = verdict.get("step"), verdict.get("phase")
    return (f"last completed step {step}" if step is not None else "step unknown") + (
        f", phase {phase}" if phase else ""
    )


def _confidence(verdict: Mapping[str, Any]) -> str:
    confidence = str(verdict.get("confidence") or "unknown")
    return f"{confidence}: {CONFIDENCE[confidence]}" if confidence in CONFIDENCE else confidence


def _action(recovery: Recovery | None) -> str:
    if recovery is None or not recovery.action:
        return "not recorded in the journal"
    return spaced(recovery.action) + (f": {recovery.reason}" if recovery.reason else "")


def _place(location: Any) -> str:
    """A line of user code."""
    if not isinstance(location, Mapping):
        return "unknown"
    return f"{location.get('file')}:{location.get('line')} in {location.get('function')}"


def _places(ranks: Sequence[int], verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """The line of each rank; empty if none of them is known."""
    locations = verdict.get("locations")
    by_rank: Mapping[str, Any] = locations if isinstance(locations, Mapping) else {}
    if not any(by_rank.get(str(rank)) for rank in ranks):
        return ()
    return tuple(f"rank {rank}: {_place(by_rank.get(str(rank)))}" for rank in ranks)
