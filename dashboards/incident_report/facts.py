"""The facts at the top of the report (cause, culprit, source line, action, result), formatted as text.

Called by `page.py`. Turns `verdict.json` and the journal's records of the incident into values for the
template, and formats durations, sizes, times and JSON values as plain text, which the template engine
escapes. Pure; does not read files (`contents.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from grpo_run.dashboards.incident_report.contents import IncidentReport
from grpo_run.runtime.history.recovery import Recovery
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


CONFIDENCE = {
    "proved": "records or thread states of the ranks show the cause",
    "deadline": "a deadline passed; nothing proves the cause",
    "inferred": "the cause itself was not observed",
    "unknown": "too little was observed",
}


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """A line of user code. `place` is `file:line`, or None if unknown; `rank` is set in a list by rank."""

    place: str | None
    function: str | None = None
    rank: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One row of the facts, with one of the values set; which one determines its layout."""

    name: str
    text: str = ""
    code: str = ""
    block: str = ""
    items: tuple[str, ...] = ()
    line: SourceLine | None = None
    lines: tuple[SourceLine, ...] = ()

    def is_known(self) -> bool:
        """Whether the row has a value to show."""
        return bool(self.text or self.code or self.block or self.items or self.line or self.lines)


@dataclass(frozen=True, kw_only=True)
class Tag:
    """A short word below the headline; `alarm` draws it in the alarm color."""

    text: str
    alarm: bool


def ranks_in(value: Any) -> tuple[int, ...]:
    """The integers of a JSON list; empty for any other value."""
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def facts_of(report: IncidentReport) -> tuple[Fact, ...]:
    """The known facts, in the order of the page; empty without a verdict."""
    verdict = report.verdict
    if not verdict:
        return ()
    culprits = ranks_in(verdict.get("culprits"))
    recovery = report.recovery
    locations = verdict.get("locations")
    by_rank: Mapping[str, Any] = locations if isinstance(locations, Mapping) else {}
    rows = (
        Fact(name="Cause", code=str(verdict.get("cause") or "unknown")),
        Fact(name="Culprit", text=rank_names(culprits) if culprits else "no rank of this node is named"),
        Fact(name="Step and phase", text=_step_and_phase(verdict)),
        _culprit_lines(verdict.get("location"), culprits, by_rank),
        Fact(name="Confidence", text=_confidence(verdict)),
        Fact(name="Memory", text=described_in(verdict)),
        Fact(name="Mismatch", block=plain(verdict["mismatch"]) if verdict.get("mismatch") else ""),
        _waiting(ranks_in(verdict.get("waiters")), by_rank),
        Fact(name="Action taken", text=_action(report)),
        Fact(name="Time to detect", text=duration(recovery.detection_seconds) if recovery else ""),
        Fact(name="Time to recover", text=duration(recovery.recovery_seconds) if recovery else ""),
        Fact(name="Repeated steps", text=_repeated_steps(report)),
        Fact(name="Excluded from the loss", text=report.excluded),
        Fact(name="Not resumed", text=recovery.mismatch if recovery else ""),
        Fact(name="Tried before", items=tuple(map(str, verdict.get("tried") or ()))),
    )
    return tuple(fact for fact in rows if fact.is_known())


def tags_of(report: IncidentReport) -> tuple[Tag, ...]:
    """Cause, confidence and result; empty without a verdict."""
    if not report.verdict:
        return ()
    recovery = report.recovery
    recovered = recovery is not None and recovery.recovery_seconds is not None
    action = spaced(recovery.action) if recovery and recovery.action else "result unknown"
    return (
        Tag(text=spaced(report.verdict.get("cause")), alarm=True),
        Tag(text=str(report.verdict.get("confidence") or "confidence unknown"), alarm=False),
        Tag(text="recovered" if recovered else action, alarm=not recovered),
    )


def _step_and_phase(verdict: Mapping[str, Any]) -> str:
    step, phase = verdict.get("step"), verdict.get("phase")
    return (f"last completed step {step}" if step is not None else "step unknown") + (
        f", phase {phase}" if phase else ""
    )


def _confidence(verdict: Mapping[str, Any]) -> str:
    confidence = str(verdict.get("confidence") or "unknown")
    return f"{confidence}: {CONFIDENCE[confidence]}" if confidence in CONFIDENCE else confidence


def _action(report: IncidentReport) -> str:
    recovery = report.recovery
    if recovery is None or not recovery.action:
        return "not recorded in the journal"
    return spaced(recovery.action) + (f": {recovery.reason}" if recovery.reason else "")


def _repeated_steps(report: IncidentReport) -> str:
    recovery = report.recovery
    return str(recovery.lost_steps) if recovery and recovery.lost_steps is not None else ""


def _source_line(location: Any, rank: int | None = None) -> SourceLine:
    if not isinstance(location, Mapping):
        return SourceLine(place=None, rank=rank)
    place = f"{location.get('file')}:{location.get('line')}"
    return SourceLine(place=place, function=str(location.get("function")), rank=rank)


def _culprit_lines(location: Any, culprits: Sequence[int], by_rank: Mapping[str, Any]) -> Fact:
    if isinstance(location, Mapping):
        return Fact(name="Source line", line=_source_line(location))
    return Fact(name="Source line", lines=_lines(culprits, by_rank))


def _waiting(waiters: Sequence[int], by_rank: Mapping[str, Any]) -> Fact:
    lines = _lines(waiters, by_rank)
    return Fact(name="Waiting", lines=lines, text=rank_names(waiters) if waiters and not lines else "")


def _lines(ranks: Sequence[int], by_rank: Mapping[str, Any]) -> tuple[SourceLine, ...]:
    """The source line of each rank; empty if none of them is known."""
    if not any(by_rank.get(str(rank)) for rank in ranks):
        return ()
    return tuple(_source_line(by_rank.get(str(rank)), rank) for rank in ranks)
