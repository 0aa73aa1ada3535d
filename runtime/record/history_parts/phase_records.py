"""Durations of phases and callbacks in earlier attempts, from the journal. Called by `history.py`. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import Durations

_CALLBACK = "callback "
"""Prefix that tells the durations of a callback from those of a phase."""


@dataclass
class PhaseRecords:
    """By name of the phase or callback, the last durations written for it, as JSON."""

    _records: dict[str, Any] = field(default_factory=dict)

    def apply(self, record: Mapping[str, Any]) -> None:
        """Apply a `phase_learned` event."""
        callback = record.get("callback")
        name = str(record.get("phase")) if callback is None else f"{_CALLBACK}{callback}"
        self._records[name] = record.get("durations")

    def of_phase(self, phase: Phase) -> Any:
        """Return the durations of a phase as JSON; None if there are none."""
        return self._records.get(phase.name)

    def durations(self) -> dict[PhaseKey, Durations]:
        """Return how long phases and callbacks took so far.

        Invalid records are ignored; those phases are measured again.
        """
        learned: dict[PhaseKey, Durations] = {}
        for name, value in self._records.items():
            with contextlib.suppress(ValueError, KeyError):
                key: PhaseKey = name[len(_CALLBACK) :] if name.startswith(_CALLBACK) else Phase[name]
                learned[key] = Durations.from_json(value)
        return learned
