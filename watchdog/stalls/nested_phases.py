"""Time that inner phases took inside phases that are still open, collected over successive scans.

A phase's clock pauses while another phase is open inside it: a checkpoint of one minute inside a `data` phase
of milliseconds is not a stall. Used by `overdue.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.watchdog.observation import OpenPhase, PhaseKey, Slot

Key = tuple[int, int, OpenPhase]
"""Rank, nesting depth and the phase that is open there."""


@dataclass(frozen=True, slots=True)
class NestedPhaseTime:
    """Time of finished inner phases. `after` returns the state after one more scan.

    `spent` holds seconds by key of the inner phase, so that a caller can limit each to its own deadline: an
    endless succession of inner phases must not hide a stall. `ended_at` is when the last inner phase ended.
    `open_phases` are each rank's phases at the last scan.
    """

    spent: Mapping[Key, Mapping[PhaseKey, float]] = field(default_factory=dict)
    ended_at: Mapping[Key, float] = field(default_factory=dict)
    open_phases: Mapping[int, tuple[OpenPhase, ...]] = field(default_factory=dict)

    def after(self, slots: Mapping[int, Slot | None], now: float) -> NestedPhaseTime:
        """Return the state after a scan at `now` (monotonic seconds).

        A slot that could not be read counts as unchanged.
        """
        if all(slot is None or slot.phases == self.open_phases.get(rank) for rank, slot in slots.items()):
            return self
        spent: dict[Key, Mapping[PhaseKey, float]] = {}
        ended_at: dict[Key, float] = {}
        open_phases = dict(self.open_phases)
        for rank, slot in slots.items():
            before = self.open_phases.get(rank, ())
            phases = before if slot is None else slot.phases
            open_phases[rank] = phases
            unchanged = len(phases) if phases == before else 0
            while unchanged < min(len(phases), len(before)) and phases[unchanged] == before[unchanged]:
                unchanged += 1
            for depth in range(unchanged if self.spent else 0):
                key = (rank, depth, phases[depth])
                if key in self.spent:
                    spent[key], ended_at[key] = self.spent[key], self.ended_at[key]
            if 0 < unchanged < len(before):  # the phase directly inside the innermost unchanged one has ended
                inner = before[unchanged]
                ended = phases[unchanged].since_seconds if unchanged < len(phases) else now
                key = (rank, unchanged - 1, phases[unchanged - 1])
                by_phase = dict(spent.get(key, {}))
                by_phase[inner.key] = by_phase.get(inner.key, 0.0) + max(0.0, ended - inner.since_seconds)
                spent[key], ended_at[key] = by_phase, ended
        return NestedPhaseTime(spent, ended_at, open_phases)
