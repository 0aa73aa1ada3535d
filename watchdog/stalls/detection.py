"""Find ranks that are in a phase for too long without progress, and those of them to blame.

The last resort, after exits and after proofs. Called by `runtime/supervisor/detection/_stall_detector.py`
with what it observed. What could not be read is unknown: never a culprit, and never a reason to act. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.stalls.observed import Observed
from grpo_run.watchdog.stalls.overdue import PhaseClock, frozen_clock, phase_clocks, quiet_clock
from grpo_run.watchdog.stalls.stall import Stall, describe_culprits, describe_waiting_ranks


def find_stall(observed: Observed) -> Stall | None:
    """Return the ranks that hang, or None.

    Every open phase has its own clock, which starts when the phase begins or at the rank's last measured
    progress inside it. A rank is a culprit if a clock exceeds its deadline and the rank is not merely waiting
    for others. Progress extends a phase without limit: an hour of generation that makes progress is
    legitimate.
    """
    late: dict[int, PhaseClock] = {}
    quiet: dict[int, PhaseClock] = {}
    frozen: dict[int, PhaseClock] = {}
    merely_waiting = observed.merely_waiting
    for rank, slot in observed.known.items():
        clocks = phase_clocks(slot, observed)
        overdue_clock = next((clock for clock in clocks if clock.overdue), None)
        if overdue_clock is not None:
            late[rank] = overdue_clock
        stuck = frozen_clock(clocks[0], observed)
        if stuck is not None and stuck.overdue:
            frozen[rank] = stuck
        idle = quiet_clock(clocks[0], observed) if rank not in merely_waiting else None
        if idle is not None and idle.overdue:
            quiet[rank] = idle
    overdue = {**quiet, **late, **frozen}
    if not overdue:
        return None
    culprits = _find_culprits(observed, overdue, frozen)
    if culprits is None:
        return None
    if not culprits:
        return describe_waiting_ranks(overdue)
    waiters = tuple(sorted(merely_waiting - {phase.rank for phase in culprits}))
    durations = observed.learned.get(culprits[0].key)
    return describe_culprits(culprits, waiters, observed.processes, durations)


def _find_culprits(
    observed: Observed, overdue: Mapping[int, PhaseClock], frozen: Mapping[int, PhaseClock]
) -> list[PhaseClock] | None:
    """Return the overdue phases of the ranks to blame, worst first.

    None if none is to blame yet, because a rank within its deadlines or unobserved may be what the others
    wait for. Empty if all ranks wait for one another.

    Args:
        observed: of this check.
        overdue: of every rank that is beyond a deadline, one of its clocks.
        frozen: those of ranks whose interpreter is frozen.
    """
    known, waiting, merely_waiting = observed.known, observed.waiting, observed.merely_waiting
    whole_world, blind = observed.whole_world, observed.blind
    working = known.keys() - overdue.keys() - merely_waiting
    # a rank of which it is unknown whether it waits may wait for any rank that is within its deadlines or
    # unobserved
    may_wait_for_others = bool(working) or (blind and len(observed.slots) > 1) or not whole_world
    culprits = [
        phase
        for rank, phase in overdue.items()
        if observed.is_stopped(rank)
        or (rank not in merely_waiting and (rank in waiting or rank in frozen or not may_wait_for_others))
    ]
    # next to a rank that is known not to wait, one that may wait is not blamed
    culprits = [phase for phase in culprits if phase.rank in waiting or phase.rank in frozen] or culprits
    if not culprits:
        if merely_waiting != overdue.keys() or merely_waiting != known.keys() or blind or not whole_world:
            # a rank whose thread keeps its interpreter from running cannot return from a finished collective
            culprits = [phase for phase in frozen.values() if not working]
            if not culprits:
                return None
        culprits = culprits or [phase for rank, phase in overdue.items() if observed.is_heartbeat_late(rank)]
    return sorted(culprits, key=lambda phase: (phase.rank not in frozen, phase.since_seconds, phase.rank))
