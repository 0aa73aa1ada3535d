"""Overdue phases: compares the clock of each of a rank's open phases with the phase's deadline.

Called by `detection.py`. Pure. Does not decide whether the rank is to blame.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.nested_phases import NestedPhaseTime


@dataclass(frozen=True, kw_only=True, slots=True)
class OverduePhase:
    """The innermost phase of a rank that exceeds its deadline."""

    rank: int
    phase: Phase
    since_seconds: float
    silent_seconds: float
    deadline_seconds: float
    occurrence: Occurrence


def find_overdue_phase(
    slot: Slot,
    *,
    now: float,
    learned: Mapping[Phase, Durations],
    completed: Collection[Phase],
    settings: DeadlineSettings,
    progressed_at: float,
    nested: NestedPhaseTime,
) -> OverduePhase | None:
    """Return the innermost open phase that is past its deadline, or None. Arguments as for `find_stall`."""
    phases = _open_phases(slot)
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
        if silent > limit:
            return OverduePhase(
                rank=slot.rank,
                phase=here.phase,
                since_seconds=since,
                silent_seconds=silent,
                deadline_seconds=limit,
                occurrence=occurrence,
            )
    return None


def _open_phases(slot: Slot) -> tuple[OpenPhase, ...]:
    """The rank's open phases.

    Without any, the script itself runs: before its first `train()` call, or between calls.
    """
    if slot.phases:
        return slot.phases
    phase = Phase.startup if slot.state is RankState.starting else Phase.idle
    return (OpenPhase(phase=phase, since_seconds=slot.last_progress_seconds),)
