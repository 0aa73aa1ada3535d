"""The rank that the other ranks wait for, for displays and warnings while it happens.

Computed from slots and waits alone, at every stall check. Called by
`runtime.supervisor.detection.stall_detector`. Pure. Does not decide whether the rank hangs (`stall.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.observed import Observed
from grpo_run.watchdog.stalls.overdue import PhaseClock

SHORTEST_WAIT_SECONDS = 2.0
"""Ranks always wait for one another briefly; nothing is reported before a wait has lasted this long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitedRank:
    """A rank that other ranks wait for. All times are seconds of the monotonic clock.

    `since_seconds` is when the rank's phase began, or its last progress inside the phase.
    `deadline_at_seconds` is when the rank will count as hung if nothing changes. `callback` names the user's
    callback that runs (`MyCallback.on_step_end`), "" outside callbacks. `busy` says whether its processes use
    the CPU or transfer data; None if unknown. `waiters` wait for it, or may do so; empty for the only rank of
    a run. `exiting`: its script has run its last line, and the run waits for its process. `outside` names
    the processes outside the job that it is connected to while it does nothing. `unknown_wait`: the run has
    yet to show how long that takes. `unusual`: it makes progress, and has taken many times as long as the
    phase ever has. `place` is its line of the script, as far as that was looked up.
    """

    rank: int
    phase: Phase
    callback: str = ""
    since_seconds: float
    deadline_at_seconds: float
    busy: bool | None
    waiters: tuple[int, ...]
    exiting: bool = False
    outside: str = ""
    unknown_wait: bool = False
    unusual: bool = False
    place: str = ""

    @property
    def deadline_seconds(self) -> float:
        """How long the rank may be silent."""
        return self.deadline_at_seconds - self.since_seconds


def find_awaited_rank(
    observed: Observed, *, clock: Callable[[Slot], PhaseClock], busy: Mapping[int, bool | None]
) -> AwaitedRank | None:
    """Return the rank that the others wait for, the longest silent one of several; None if nobody waits.

    The only rank of a run is waited for by the run; so is, of ranks that all wait for processes outside the
    job, the longest silent one.

    Args:
        observed: of this check.
        clock: returns the clock of a rank's innermost phase.
        busy: whether each rank's processes are active; absent or None if unknown.
    """
    waiting, still = observed.waiting, observed.still
    watched = {rank: slot for rank, slot in observed.slots.items() if slot is not None and slot.runs_script}
    # a rank of which it is unknown whether it waits is in a backward pass: named neither way on its own
    merely_waiting = observed.merely_waiting
    own_work = [
        rank
        for rank, slot in watched.items()
        if rank not in merely_waiting and (waiting.get(rank) is not None or observed.goes_on(slot))
    ]
    # one that was seen in a collective may only now begin to wait
    own_work = [rank for rank in own_work if not waiting.get(rank)] or own_work
    if len(own_work) == len(watched) > 1:
        # no record tells who waits; next to ranks that do nothing, those that work are waited for
        working = [rank for rank in own_work if busy.get(rank)]
        if working and all(busy.get(rank) is False for rank in own_work if rank not in working):
            own_work = working
    waits = {rank: max(still.get(rank, 0.0), _in_vote(slot, observed.now)) for rank, slot in watched.items()}
    waiters = tuple(
        sorted(rank for rank in watched.keys() - set(own_work) if waits[rank] >= SHORTEST_WAIT_SECONDS)
    )
    idle = {rank for rank in own_work if busy.get(rank) is False and observed.whole_world}
    outside = {rank: name for rank, name in observed.connected.items() if rank in idle}
    alone = len(watched) == 1 or len(outside) == len(watched)
    clocks = [clock(watched[rank]) for rank in own_work]
    unusual = any(one.unusual for one in clocks)
    alone = alone and max(still.values(), default=0) >= SHORTEST_WAIT_SECONDS
    if not own_work or not (waiters or alone or unusual):
        return None
    awaited = min(clocks, key=lambda one: (one.since_seconds, one.rank))
    return AwaitedRank(
        rank=awaited.rank,
        phase=awaited.phase,
        callback=awaited.callback,
        since_seconds=awaited.since_seconds,
        deadline_at_seconds=awaited.deadline_at_seconds,
        busy=busy.get(awaited.rank),
        waiters=waiters,
        exiting=watched[awaited.rank].has_returned,
        outside=outside.get(awaited.rank, ""),
        unknown_wait=awaited.unknown_wait,
        unusual=awaited.unusual,
    )


def _in_vote(slot: Slot, now: float) -> float:
    """For how long a rank has waited in the vote, in which it may take part in the others' collectives."""
    return now - slot.phases[-1].since_seconds if slot.phase is Phase.vote else 0.0
