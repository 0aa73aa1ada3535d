"""Stall detection: which ranks have been in a phase for too long without progress, and which to blame.

The last resort, after exits and after proved deadlocks. Called by `runtime.detection.stall_detector` with
what it read. Pure: reads no clock and terminates nothing. What could not be read is unknown: never a culprit
and never a reason to act.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.nested_phases import NestedPhaseTime
from grpo_run.watchdog.stalls.overdue import phase_clocks
from grpo_run.watchdog.stalls.sentences import describe_culprits, describe_waiting_ranks
from grpo_run.watchdog.stalls.stall import ProcessFacts, Stall

_WATCHED_STATES = (RankState.starting, RankState.training, RankState.between)


def find_stall(
    slots: Mapping[int, Slot | None],
    *,
    now: float,
    learned: Mapping[Phase, Durations],
    completed: Mapping[int, Collection[Phase]],
    settings: DeadlineSettings,
    processes: Mapping[int, ProcessFacts | None],
    progress: Mapping[int, float],
    waiting: Mapping[int, bool],
    nested: NestedPhaseTime | None = None,
    whole_world: bool = True,
) -> Stall | None:
    """Return the ranks that hang, or None.

    Every open phase has its own clock, which starts when the phase begins or at the rank's last measured
    progress inside it. A rank is a culprit if a clock exceeds its deadline and the rank is not merely waiting
    for others. Progress extends a phase without limit: an hour of generation that makes progress is
    legitimate.

    Args:
        slots: last readings of the local ranks; None if nothing could be read.
        now: monotonic seconds.
        learned: durations of each phase, over ranks and attempts.
        completed: phases that each rank has finished in this attempt. A rank that is absent counts as being
            in its first occurrence of every phase, which has a longer deadline.
        processes: facts about each rank's process; None or absent if unknown.
        progress: when each rank last did measurable work (tokens, scores, bytes); absent or 0 for never.
        waiting: whether the rank is blocked in a collective, including one issued by C++. Absent if unknown:
            the rank is then not blamed while another rank that does not wait is within its deadlines.
        nested: state of `NestedPhaseTime.after`, including the current scan.
        whole_world: no rank runs on another node, so ranks that all wait are waiting for one another.
    """
    nested = nested or NestedPhaseTime()
    known: dict[int, Slot] = {}
    blind = False
    for rank, slot in sorted(slots.items()):
        facts = processes.get(rank)
        if slot is None or slot.state is RankState.absent or (facts is not None and facts.state == "Z"):
            blind = True
        elif slot.state in _WATCHED_STATES:
            known[rank] = slot
    clocks = {
        rank: phase_clocks(
            slot,
            now=now,
            learned=learned,
            completed=completed.get(rank, ()),
            settings=settings,
            progressed_at=progress.get(rank, 0.0),
            nested=nested,
        )
        for rank, slot in known.items()
    }
    overdue = {
        rank: next(clock for clock in of_rank if clock.overdue)
        for rank, of_rank in clocks.items()
        if any(clock.overdue for clock in of_rank)
    }
    if not overdue:
        return None
    merely_waiting = {
        rank
        for rank, slot in known.items()
        if not _is_stopped(processes.get(rank)) and (waiting.get(rank, False) or slot.phase is Phase.vote)
    }
    working = known.keys() - overdue.keys() - merely_waiting
    # a rank of which it is unknown whether it waits may wait for any rank that is within its deadlines or
    # unobserved
    may_wait_for_others = bool(working) or (blind and len(slots) > 1) or not whole_world
    culprits = [
        phase
        for rank, phase in overdue.items()
        if rank not in merely_waiting
        and (rank in waiting or _is_stopped(processes.get(rank)) or not may_wait_for_others)
    ]
    if not culprits:
        if merely_waiting != overdue.keys() or merely_waiting != known.keys() or blind or not whole_world:
            return None
        culprits = [phase for rank, phase in overdue.items() if _is_heartbeat_late(processes.get(rank))]
        if not culprits:
            return describe_waiting_ranks(overdue)
    culprits.sort(key=lambda phase: (phase.since_seconds, phase.rank))
    waiters = tuple(sorted(merely_waiting - {phase.rank for phase in culprits}))
    return describe_culprits(culprits, waiters, processes, learned.get(culprits[0].phase))


def _is_stopped(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.stopped


def _is_heartbeat_late(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.heartbeat_late
