"""What one check has observed of the local ranks: slots, processes and learned durations. Plain data.

Collected by `runtime/supervisor/detection/`; the input of `stall.py`, `overdue.py` and `awaited.py`.
What could not be read is absent, which means unknown. Judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from grpo_run.watchdog.observation import OpenPhase, Phase, PhaseKey, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import ENDLESS_PHASES, DeadlineSettings, Tokens
from grpo_run.watchdog.stalls.durations import Durations

HEARTBEAT_LATE_SECONDS = 3.0
"""A heartbeat thread stamps the slot about once per second; after this time without one, the interpreter is
stuck."""

PASSING_SECONDS = 2.0
"""A rank that has moved within this time goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """State of a rank's process and its descendants at one moment.

    `state` is the letter of /proc/PID/stat: R, S, D, T, Z. `heartbeat_age_seconds` is how long ago a Python
    thread of the rank last ran; NaN if unknown. `quiet_seconds` is for how long neither the slot changed nor
    the process tree did anything; 0 if it works or if that is unknown. `connected`: a connection to a process
    outside the job, or a device, was open meanwhile; None if unknown. `frozen_seconds` is for how long the
    interpreter has not run because it is stopped or because one of its threads keeps running; 0 otherwise.
    """

    state: str
    heartbeat_age_seconds: float = float("nan")
    quiet_seconds: float = 0.0
    connected: bool | None = None
    frozen_seconds: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal."""
        return self.state == "T"

    @property
    def heartbeat_late(self) -> bool:
        """Whether the interpreter has not run for too long."""
        return self.heartbeat_age_seconds > HEARTBEAT_LATE_SECONDS


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


@dataclass(frozen=True, slots=True)
class OpenGenerations:
    """The open generation of each rank: when it began, and the forward passes before it.

    `after` returns the state after one more scan.
    """

    began: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def after(self, slots: Mapping[int, Slot | None]) -> OpenGenerations:
        """Return the state after a scan. A slot that could not be read counts as unchanged."""
        began = dict(self.began)
        for rank, slot in slots.items():
            if slot is None:
                continue
            since = slot.generating_since
            if since is None:
                began.pop(rank, None)
            elif began.get(rank, (None, 0))[0] != since:
                began[rank] = since, slot.generation_passes
        return OpenGenerations(began)

    def tokens(self, slot: Slot) -> Tokens:
        """Return what the rank's open generation has done so far, as far as it was seen."""
        since, before = self.began.get(slot.rank, (None, 0))
        known = since is not None and since == slot.generating_since
        return Tokens(passes=slot.generation_passes - before if known else 0, limit=slot.generation_limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The local ranks at one check. Every mapping is by rank.

    Attributes:
        slots: last readings; None for one that could not be read.
        now: monotonic seconds.
        learned: durations of each phase and callback, over ranks and attempts.
        completed: phases that each rank has finished in this attempt. A rank that is absent counts as being
            in its first occurrence of every phase, which has a longer deadline.
        settings: bounds of the deadlines.
        processes: facts about each rank's process; None or absent if unknown.
        progress: when each rank last did measurable work (tokens, scores, bytes); absent for never.
        waiting: whether the rank is blocked in a collective, including one issued by C++; absent if unknown.
        computing: when each rank was last seen using the CPU; absent for never.
        still: for how many seconds each rank's slot has not changed; absent for 0.
        nested: state of `NestedPhaseTime.after`, including the current scan.
        generations: state of `OpenGenerations.after`, likewise.
        since_seconds: monotonic seconds; the time before it was not observed.
        exited: ranks whose process has ended.
        connected: ranks with a connection to a process outside the job, with its address, as far as it is
            known.
        whole_world: no rank runs on another node, so ranks that all wait are waiting for one another.
    """

    slots: Mapping[int, Slot | None]
    now: float
    learned: Mapping[PhaseKey, Durations]
    completed: Mapping[int, Collection[PhaseKey]]
    settings: DeadlineSettings
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    progress: Mapping[int, float] = field(default_factory=dict)
    waiting: Mapping[int, bool] = field(default_factory=dict)
    computing: Mapping[int, float] = field(default_factory=dict)
    still: Mapping[int, float] = field(default_factory=dict)
    nested: NestedPhaseTime = field(default_factory=NestedPhaseTime)
    generations: OpenGenerations = field(default_factory=OpenGenerations)
    since_seconds: float = 0.0
    exited: Collection[int] = ()
    connected: Mapping[int, str] = field(default_factory=dict)
    whole_world: bool = True

    @property
    def known(self) -> dict[int, Slot]:
        """The slots of ranks that run the script, in order."""
        return {
            rank: slot
            for rank, slot in sorted(self.slots.items())
            if slot is not None and slot.runs_script and not self._is_zombie(rank)
        }

    @property
    def blind(self) -> bool:
        """Whether a rank cannot be observed."""
        return any(
            slot is None or slot.state is RankState.absent or self._is_zombie(rank)
            for rank, slot in self.slots.items()
        )

    @property
    def merely_waiting(self) -> frozenset[int]:
        """Ranks that wait for other ranks, in a collective or in the vote."""
        return frozenset(
            rank
            for rank, slot in self.known.items()
            if not self.is_stopped(rank)
            and (slot.phase is Phase.vote or (self.waiting.get(rank, False) and not self.goes_on(slot)))
        )

    def goes_on(self, slot: Slot) -> bool:
        """Whether a rank generates or runs the model, which it may do in step with others: one that is seen
        in a collective has only just entered it.
        """
        return slot.phase in ENDLESS_PHASES and self.still.get(slot.rank, math.inf) < PASSING_SECONDS

    @property
    def nobody_works_seconds(self) -> float:
        """For how long no rank has worked: each waits for others, does nothing, or has exited; 0 if unknown.

        A rank that only now begins to wait may have worked until now for one that does nothing.
        """
        if self.blind or not self.whole_world:
            return 0.0
        waiting, seconds = self.merely_waiting, []
        for rank in self.slots.keys() - set(self.exited):
            facts = self.processes.get(rank)
            quiet_seconds = facts.quiet_seconds if facts is not None else 0.0
            seconds.append(self.still.get(rank, 0.0) if rank in waiting else quiet_seconds)
        return min(seconds, default=0.0)

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal has stopped the rank's process."""
        facts = self.processes.get(rank)
        return facts is not None and facts.stopped

    def is_heartbeat_late(self, rank: int) -> bool:
        """Whether the rank's interpreter has not run for too long."""
        facts = self.processes.get(rank)
        return facts is not None and facts.heartbeat_late

    def _is_zombie(self, rank: int) -> bool:
        facts = self.processes.get(rank)
        return facts is not None and facts.state == "Z"
