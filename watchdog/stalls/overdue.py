"""The clock of each open phase of a rank, compared with the phase's deadline.

Called by `detection.py`, and by `runtime.detection.stall_detector` for the rank that others wait for. Pure.
Does not decide whether the rank is to blame.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.nested_phases import NestedPhaseTime


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseClock:
    """How long a rank has been in an open phase without progress, and how long it may be."""

    rank: int
    phase: Phase
    since_seconds: float
    silent_seconds: float
    deadline_seconds: float
    occurrence: Occurrence
    deadline_at_seconds: float

    @property
    def overdue(self) -> bool:
        """Whether the phase is past its deadline."""
        return self.silent_seconds > self.deadline_seconds


def phase_clocks(
    slot: Slot,
    *,
    now: float,
    learned: Mapping[Phase, Durations],
    completed: Collection[Phase],
    settings: DeadlineSettings,
    progressed_at: float,
    nested: NestedPhaseTime,
) -> list[PhaseClock]:
    """Return the clocks of a rank's open phases, the innermost first. Arguments as for `find_stall`."""
    phases = _open_phases(slot)
    clocks = []
    for depth in range(len(phases) - 1, -1, -1):
        here = phases[depth]
        until = now if depth == len(phases) - 1 else phases[depth + 1].since_seconds
        since = max(here.since_seconds, progressed_at)
        silent = until - since
        key = (slot.rank, depth, here)
        if since < nested.ended_at.get(
            key, -1.0
        ):  # later progress restarts the clock, so nothing is subtracted
            silent -= sum(
                min(seconds, deadline_seconds(phase, learned.get(phase), Occurrence.first, settings))
                for phase, seconds in nested.spent[key].items()
            )
        occurrence = Occurrence.later if here.phase in completed else Occurrence.first
        limit = deadline_seconds(here.phase, learned.get(here.phase), occurrence, settings)
        clocks.append(
            PhaseClock(
                rank=slot.rank,
                phase=here.phase,
                since_seconds=since,
                silent_seconds=silent,
                deadline_seconds=limit,
                occurrence=occurrence,
                deadline_at_seconds=until + limit - silent,
            )
        )
    return clocks


def _open_phases(slot: Slot) -> tuple[OpenPhase, ...]:
    """The rank's open phases.

    Without any, the script itself runs: before its first `train()` call, or between calls.
    """
    if slot.phases:
        return slot.phases
    phase = Phase.startup if slot.state is RankState.starting else Phase.idle
    return (OpenPhase(phase=phase, since_seconds=slot.last_progress_seconds),)
