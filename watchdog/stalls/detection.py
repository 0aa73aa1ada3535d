"""Find ranks that are in a phase for too long without progress, and ranks slower than the others.

`find_stall` is the last resort, after exits and after proofs: it selects the overdue ranks and those to
blame. `find_stragglers` compares the ranks' own work; stragglers are reported and never terminated. Called
by `runtime/supervisor/detection/stall_detector.py` with what it read. What could not be read is unknown:
never a culprit, and never a reason to act. Pure: reads no clock and terminates nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median

from grpo_run.watchdog.observation import Phase, PhaseKey, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    frozen_deadline_seconds,
    quiet_deadline_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.overdue import NestedPhaseTime, PhaseClock, Rule, phase_clocks
from grpo_run.watchdog.stalls.stall import ProcessFacts, Stall, describe_culprits, describe_waiting_ranks

_WATCHED_STATES = (RankState.starting, RankState.training, RankState.between, RankState.returned)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranks:
    """What is known of the ranks: `known` have a slot and run the script; `waiting` wait for other ranks."""

    known: Mapping[int, Slot]
    blind: bool
    waiting: frozenset[int]
    exited: frozenset[int]
    processes: Mapping[int, ProcessFacts | None]

    @property
    def suspended(self) -> bool:
        """Whether a signal has stopped every rank of this node, as a scheduler does that preempts the job.

        One rank alone may have stopped itself. Whoever suspends a job stops its supervisor too, and all clocks start
        again when that continues.
        """
        return len(self.known) > 1 and all(_is_stopped(self.processes.get(rank)) for rank in self.known)


def find_stall(
    slots: Mapping[int, Slot | None],
    *,
    now: float,
    learned: Mapping[PhaseKey, Durations],
    completed: Mapping[int, Collection[PhaseKey]],
    settings: DeadlineSettings,
    processes: Mapping[int, ProcessFacts | None],
    progress: Mapping[int, float],
    waiting: Mapping[int, bool],
    computing: Mapping[int, float] | None = None,
    still: Mapping[int, float] | None = None,
    nested: NestedPhaseTime | None = None,
    exited: Collection[int] = (),
    connected: Collection[int] = (),
    whole_world: bool = True,
) -> Stall | None:
    """Return the ranks that hang, or None.

    Every open phase has its own clock, which starts when the phase begins or at the rank's last measured
    progress inside it. A rank is a culprit if a clock exceeds its deadline and the rank is not merely waiting
    for others. Progress extends a phase without limit: an hour of generation that makes progress is
    legitimate. Two shorter deadlines hold in every phase: of a rank that does nothing at all while nobody else
    does, and of one whose interpreter is frozen.

    Args:
        slots: last readings of the local ranks; None if nothing could be read.
        now: monotonic seconds.
        learned: durations of each phase and callback, over ranks and attempts.
        completed: phases that each rank has finished in this attempt. A rank that is absent counts as being
            in its first occurrence of every phase, which has a longer deadline.
        processes: facts about each rank's process; None or absent if unknown.
        progress: when each rank last did measurable work (tokens, scores, bytes); absent or 0 for never.
        waiting: whether the rank is blocked in a collective, including one issued by C++. Absent if unknown:
            the rank is then not blamed while another rank that does not wait is within its deadlines.
        computing: when each rank was last seen computing in a phase in which that is activity; absent or 0 for
            never.
        still: for how many seconds each rank's slot has not changed; absent for 0.
        nested: state of `NestedPhaseTime.after`, including the current scan.
        exited: ranks whose process has ended.
        connected: ranks with a connection to a process outside the job. It may be slow once, so their deadlines
            are longer.
        whole_world: no rank runs on another node, so ranks that all wait are waiting for one another.
    """
    nested = nested or NestedPhaseTime()
    ranks = _observe(slots, processes, waiting, exited)
    clocks = {
        rank: phase_clocks(
            slot,
            now=now,
            learned=learned,
            completed=completed.get(rank, ()),
            settings=settings,
            progressed_at=progress.get(rank, 0.0),
            computing_at=(computing or {}).get(rank, 0.0),
            nested=nested,
            connected=rank in connected,
        )
        for rank, slot in ranks.known.items()
    }
    frozen = _find_frozen(ranks, clocks, learned, settings, now)
    if ranks.suspended:  # no other deadline runs while the job is preempted
        return describe_culprits(list(frozen.values()), (), processes, None) if frozen else None
    late = {
        rank: next(clock for clock in of_rank if clock.overdue)
        for rank, of_rank in clocks.items()
        if any(clock.overdue for clock in of_rank)
    }
    quiet: dict[int, PhaseClock] = {}
    if whole_world:
        nobody_works = nobody_works_seconds(slots, processes, waiting, still or {}, exited)
        quiet = _find_quiet(ranks, clocks, learned, settings, nobody_works, now)
    overdue = {**quiet, **late, **frozen}
    if not overdue:
        return None
    culprits = _find_culprits(
        ranks, overdue, frozen, waiting, other_ranks=len(slots) > 1, whole_world=whole_world
    )
    if culprits is None:
        return None
    if not culprits:
        return describe_waiting_ranks(overdue)
    waiters = tuple(sorted(ranks.waiting - {phase.rank for phase in culprits}))
    return describe_culprits(culprits, waiters, processes, learned.get(culprits[0].key))


def _find_culprits(
    ranks: _Ranks,
    overdue: Mapping[int, PhaseClock],
    frozen: Mapping[int, PhaseClock],
    waiting: Mapping[int, bool],
    *,
    other_ranks: bool,
    whole_world: bool,
) -> list[PhaseClock] | None:
    """Return the overdue phases of the ranks to blame, worst first.

    None if none is to blame yet, because a rank within its deadlines or unobserved may be what the others wait for. Empty
    if all ranks wait for one another. Arguments as for `find_stall`.

    Args:
        overdue: of every rank that is beyond a deadline, one of its clocks.
        frozen: those of ranks whose interpreter is frozen.
        other_ranks: there is more than one local rank.
    """
    known, processes, merely_waiting = ranks.known, ranks.processes, ranks.waiting
    working = known.keys() - overdue.keys() - merely_waiting
    # a rank of which it is unknown whether it waits may wait for any rank that is within its deadlines or
    # unobserved
    may_wait_for_others = bool(working) or (ranks.blind and other_ranks) or not whole_world
    culprits = [
        phase
        for rank, phase in overdue.items()
        if _is_stopped(processes.get(rank))
        or (rank not in merely_waiting and (rank in waiting or rank in frozen or not may_wait_for_others))
    ]
    # next to a rank that is known not to wait, one that may wait is not blamed
    culprits = [phase for phase in culprits if phase.rank in waiting or phase.rank in frozen] or culprits
    if not culprits:
        if (
            merely_waiting != overdue.keys()
            or merely_waiting != known.keys()
            or ranks.blind
            or not whole_world
        ):
            # a rank whose thread keeps its interpreter from running cannot return from a finished collective
            culprits = [phase for phase in frozen.values() if not working]
            if not culprits:
                return None
        culprits = culprits or [
            phase for rank, phase in overdue.items() if _is_heartbeat_late(processes.get(rank))
        ]
    return sorted(culprits, key=lambda phase: (phase.rank not in frozen, phase.since_seconds, phase.rank))


def _find_quiet(
    ranks: _Ranks,
    clocks: Mapping[int, list[PhaseClock]],
    learned: Mapping[PhaseKey, Durations],
    settings: DeadlineSettings,
    nobody_works: float,
    now: float,
) -> dict[int, PhaseClock]:
    """Ranks that have done nothing for too long while nobody works, with the clock of their innermost phase."""
    found = {}
    for rank, (innermost, *_) in clocks.items():
        clock = quiet_clock(
            innermost, ranks.processes.get(rank), learned.get(innermost.key), settings, nobody_works, now
        )
        if rank not in ranks.waiting and clock is not None and clock.overdue:
            found[rank] = clock
    return found


def _observe(
    slots: Mapping[int, Slot | None],
    processes: Mapping[int, ProcessFacts | None],
    waiting: Mapping[int, bool],
    exited: Collection[int],
) -> _Ranks:
    known: dict[int, Slot] = {}
    blind = False
    for rank, slot in sorted(slots.items()):
        facts = processes.get(rank)
        if slot is None or slot.state is RankState.absent or (facts is not None and facts.state == "Z"):
            blind = True
        elif slot.state in _WATCHED_STATES:
            known[rank] = slot
    return _Ranks(
        known=known,
        blind=blind,
        waiting=frozenset(
            rank
            for rank, slot in known.items()
            if not _is_stopped(processes.get(rank)) and (waiting.get(rank, False) or slot.phase is Phase.vote)
        ),
        exited=frozenset(exited),
        processes=processes,
    )


def _find_frozen(
    ranks: _Ranks,
    clocks: Mapping[int, list[PhaseClock]],
    learned: Mapping[PhaseKey, Durations],
    settings: DeadlineSettings,
    now: float,
) -> dict[int, PhaseClock]:
    """Ranks whose interpreter has been frozen for too long, with the clock of their innermost phase."""
    found = {}
    for rank, (innermost, *_) in clocks.items():
        clock = frozen_clock(
            innermost,
            ranks.processes.get(rank),
            learned.get(innermost.key),
            settings,
            suspended=ranks.suspended,
            now=now,
        )
        if clock is not None and clock.overdue:
            found[rank] = clock
    return found


def frozen_clock(
    innermost: PhaseClock,
    facts: ProcessFacts | None,
    durations: Durations | None,
    settings: DeadlineSettings,
    *,
    suspended: bool,
    now: float,
) -> PhaseClock | None:
    """Return the clock of a rank whose interpreter is frozen; None if it runs, or if that is unknown.

    Args: as for `quiet_clock`; `suspended`: every rank of the node is stopped.
    """
    if facts is None or not facts.frozen_seconds:
        return None
    limit = frozen_deadline_seconds(durations, settings, suspended=suspended)
    return replace(
        innermost,
        silent_seconds=facts.frozen_seconds,
        deadline_seconds=limit,
        deadline_at_seconds=now + limit - facts.frozen_seconds,
        rule=Rule.frozen,
    )


def nobody_works_seconds(
    slots: Mapping[int, Slot | None],
    processes: Mapping[int, ProcessFacts | None],
    waiting: Mapping[int, bool],
    still: Mapping[int, float],
    exited: Collection[int],
) -> float:
    """For how long no rank has worked: each waits for others, does nothing, or has exited; 0 if unknown.

    A rank that only now begins to wait may have worked until now for one that does nothing. Arguments as for
    `find_stall`.
    """
    ranks = _observe(slots, processes, waiting, exited)
    if ranks.blind:
        return 0.0
    seconds = []
    for rank in slots.keys() - ranks.exited:
        facts = processes.get(rank)
        if rank in ranks.waiting:
            seconds.append(still.get(rank, 0.0))
        else:
            seconds.append(facts.quiet_seconds if facts is not None else 0.0)
    return min(seconds, default=0.0)


def quiet_clock(
    innermost: PhaseClock,
    facts: ProcessFacts | None,
    durations: Durations | None,
    settings: DeadlineSettings,
    nobody_works: float,
    now: float,
) -> PhaseClock | None:
    """Return the clock of a rank that does nothing while nobody works; None if somebody does, or may.

    Args:
        innermost: the clock of the rank's innermost phase.
        facts: about the rank's process.
        durations: of the innermost phase.
        settings: bounds.
        nobody_works: of `nobody_works_seconds`.
        now: monotonic seconds.
    """
    if facts is None or not nobody_works:
        return None
    limit = quiet_deadline_seconds(durations, settings, connected=facts.connected is not False)
    return replace(
        innermost,
        silent_seconds=nobody_works,
        deadline_seconds=limit,
        deadline_at_seconds=now + limit - nobody_works,
        rule=Rule.quiet,
    )


def _is_stopped(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.stopped


def _is_heartbeat_late(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.heartbeat_late


MIN_RATIO = 1.5
MIN_DIFFERENCE_SECONDS = 0.05
MIN_OCCURRENCES = 20
INDEPENDENT_PHASES = (Phase.generate, Phase.reward, Phase.data, Phase.optimizer, Phase.checkpoint)
"""Phases in which a rank works mostly for itself; in all others every rank is as slow as the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that takes much longer than the others: its median in one phase and theirs."""

    rank: int
    phase: Phase
    median_seconds: float
    others_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long as the others."""
        return self.median_seconds / self.others_seconds


def find_stragglers(durations_by_rank: Mapping[int, Mapping[PhaseKey, Durations]]) -> list[Straggler]:
    """Return ranks whose median is at least 1.5 times the median of the others; the largest difference first.

    Medians are interpolated in half-octave buckets, so a ratio near the threshold may fall on either side.
    """
    found = []
    for phase in INDEPENDENT_PHASES:
        medians = {
            rank: phases[phase].median_seconds
            for rank, phases in durations_by_rank.items()
            if phase in phases and phases[phase].count >= MIN_OCCURRENCES
        }
        for rank, own in medians.items():
            others = [seconds for other, seconds in medians.items() if other != rank]
            if not others:
                continue
            usual = median(others)
            if own >= MIN_RATIO * usual and own - usual >= MIN_DIFFERENCE_SECONDS:
                found.append(Straggler(rank=rank, phase=phase, median_seconds=own, others_seconds=usual))
    return sorted(found, key=lambda one: (one.others_seconds - one.median_seconds, one.rank))
