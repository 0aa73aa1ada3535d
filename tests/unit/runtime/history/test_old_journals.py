"""A journal that an earlier version has begun is read as that version read it.

`journal_0_1_0.jsonl` has every event of a real run of version 0.1.0 with a killed rank, each further event
that version wrote, one that nobody knows, one that was shortened to its header and half a line. The history
beside it is what version 0.1.0 made of it, without fields that are shown no more. What a script saves itself
was progress then, and is not read any more.
"""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Any

from grpo_run.runtime.event import Event, as_record
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import JournalReader
from grpo_run.runtime.launching.reading import history_parts

HERE = Path(__file__).parent
FEATURES = {
    "injections_fired": "FiredInjections.texts",
    "quarantine": "Quarantine",
    "reward_failures": "RewardFailures",
    "tracker_runs": "TrackerRuns.names",
    "growth": "GrownPhases.found",
    "memory_trace": "MemoryFindings",
    "memory_plan": "PlanRecord",
    "guard_trips": "GuardTrips.counts",
    "nonfinite_refused": "GuardTrips.nonfinite_refused",
    "masked": "MaskedSamples",
}
"""What features replay now, by the field of that history: a part, or a field of it."""


def plain(value: Any) -> Any:
    """Return an object of the history as JSON values."""
    if dataclasses.is_dataclass(value):
        return {one.name.lstrip("_"): plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Event):
        return as_record(value)
    if isinstance(value, dict):
        return {str(getattr(key, "name", key)): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    return value.value if isinstance(value, Enum) else value


def test_a_journal_of_version_0_1_0_has_the_same_history() -> None:
    """A run that is resumed after an update continues."""
    known = json.loads((HERE / "journal_0_1_0.history.json").read_text())
    history = History(parts=tuple(history_parts()))
    for event in JournalReader(HERE / "journal_0_1_0.jsonl", history.decoder).new():
        history.apply(event)
    read = plain(history)
    parts = {type(part).__name__: plain(part) for part in history.parts}
    del read["parts"]
    for field, place in FEATURES.items():
        part, _, name = place.partition(".")
        read[field] = parts[part][name] if name else parts[part]
    assert read["unreadable"] == 1
    # which that version did not keep
    assert [one.pop("attempt") for one in read["recoveries"]] == [0, 1]
    assert json.loads(json.dumps(read)) == known
