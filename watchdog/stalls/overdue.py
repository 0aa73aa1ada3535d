"""The clock and the deadline of each open phase of a rank.

A phase's clock pauses while another phase is open inside it: a checkpoint of one minute inside a `data`
phase of milliseconds is not a stall. The time of inner phases is collected over successive scans. Called by
`detection.py`, and by `runtime/supervisor/detection/stall_detector.py` for the rank that others wait for.
Does not decide whether the rank is to blame. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from grpo_run.watchdog.observation import OpenPhase, Phase, PhaseKey, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    Occurrence,
    computing_deadline_seconds,
    deadline_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations

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


RECENT_SECONDS = 10.0
"""A rank that has computed within this time is expected to continue."""


class Rule(str, Enum):
    """Which rule sets a deadline."""

    learned = "learned"
    """No progress for longer than the durations of the phase allow."""
    connected = "connected"
    """The same while a connection to a process outside the job is open."""
    computing = "computing"
    """Nothing but CPU time for too long, in a phase in which CPU time is activity."""
    quiet = "quiet"
    """Neither CPU time nor I/O nor traffic, while all other ranks wait."""
    frozen = "frozen"
    """The interpreter is stopped, or one of its threads keeps it from running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseClock:
    """How long a rank has been in an open phase without progress, and how long it may be.

    `deadline_at_seconds` is when the phase will be past its deadline if nothing changes, in monotonic seconds.
    """

    rank: int
    phase: Phase
    callback: str = ""
    since_seconds: float
    silent_seconds: float
    deadline_seconds: float
    occurrence: Occurrence
    deadline_at_seconds: float
    rule: Rule = Rule.learned

    @property
    def overdue(self) -> bool:
        """Whether the phase is past its deadline."""
        return self.silent_seconds > self.deadline_seconds

    @property
    def key(self) -> PhaseKey:
        """What the durations of this phase are learned by."""
        return self.callback if self.phase is Phase.callback else self.phase


def phase_clocks(
    slot: Slot,
    *,
    now: float,
    learned: Mapping[PhaseKey, Durations],
    completed: Collection[PhaseKey],
    settings: DeadlineSettings,
    progressed_at: float,
    computing_at: float = 0.0,
    nested: NestedPhaseTime,
    connected: bool = False,
) -> list[PhaseClock]:
    """Return the clocks of a rank's open phases, the innermost first. Arguments as for `find_stall`."""
    phases = _open_phases(slot)
    clocks = []
    for depth in range(len(phases) - 1, -1, -1):
        here = phases[depth]
        until = now if depth == len(phases) - 1 else phases[depth + 1].since_seconds
        since = max(here.since_seconds, progressed_at)
        key = (slot.rank, depth, here)
        occurrence = Occurrence.later if here.key in completed else Occurrence.first
        durations = learned.get(here.key)
        limit = deadline_seconds(here.phase, durations, occurrence, settings)
        silent = until - since - _inner_seconds(key, since, nested, learned, settings)
        rule = Rule.learned
        if connected and limit < settings.outside_limit_seconds:
            rule, limit = Rule.connected, settings.outside_limit_seconds
        deadline_at = until + limit - silent
        if computing_at > since:
            # CPU time restarts the clock of the usual deadline, but not that of a longer one
            longer = computing_deadline_seconds(here.phase, durations, occurrence, settings)
            inner = _inner_seconds(key, computing_at, nested, learned, settings)
            idle = max(0.0, until - computing_at - inner)
            ends_at = until + longer - silent
            if silent > longer or idle < RECENT_SECONDS:
                rule, limit, deadline_at = Rule.computing, longer, ends_at
            else:
                silent, deadline_at = idle, min(ends_at, until + limit - idle)
                since = computing_at
        clocks.append(
            PhaseClock(
                rank=slot.rank,
                phase=here.phase,
                callback=here.callback,
                since_seconds=since,
                silent_seconds=silent,
                deadline_seconds=limit,
                occurrence=occurrence,
                deadline_at_seconds=deadline_at,
                rule=rule,
            )
        )
    return clocks


def _inner_seconds(
    key: tuple[int, int, OpenPhase],
    since: float,
    nested: NestedPhaseTime,
    learned: Mapping[PhaseKey, Durations],
    settings: DeadlineSettings,
) -> float:
    """How much of the time since `since` belongs to finished inner phases.

    Of each kind of phase, at most its own deadline; nothing if the clock has restarted after the last one.
    """
    if since >= nested.ended_at.get(key, -1.0):
        return 0.0
    return sum(
        min(seconds, deadline_seconds(_phase_of(inner), learned.get(inner), Occurrence.first, settings))
        for inner, seconds in nested.spent[key].items()
    )


def _phase_of(key: PhaseKey) -> Phase:
    return key if isinstance(key, Phase) else Phase.callback


def _open_phases(slot: Slot) -> tuple[OpenPhase, ...]:
    """The rank's open phases.

    Without any, the script itself runs: before its first `train()` call, or between calls.
    """
    if slot.phases:
        return slot.phases
    starting = slot.state is RankState.starting and not slot.trains_alone
    phase = Phase.startup if starting else Phase.idle
    return (OpenPhase(phase=phase, since_seconds=slot.last_progress_seconds),)
