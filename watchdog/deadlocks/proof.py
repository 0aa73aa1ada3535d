"""Proof that ranks wait for one another forever, from the collectives that each of them has enqueued.

Called by `runtime.supervisor.detection.deadlock_detector` with observations that have not changed over two
polls, and by the incident investigation. Uses no clock: a rank that is only late is never proof, and neither
is a rank that could not be observed or that has a thread which may still act. Does no I/O and finds no cause
outside collectives. `collectives.py` says which ranks a collective needs, `_culprit.py` which rank is at
fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import combinations

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks._culprit import find_culprits
from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    CONSENSUS_GROUP,
    Collective,
    can_meet,
    needed_members,
    share_group,
)
from grpo_run.watchdog.deadlocks.deadlock import (
    Deadlock,
    describe_deadlock,
    describe_last_calls,
    describe_operation,
)
from grpo_run.watchdog.deadlocks.positions import MIN_TIMEOUT_SECONDS, BlockedThread, ObservedRanks, Position


def prove(positions: Mapping[int, Position], *, world_size: int) -> Deadlock | None:
    """Return the deadlock that these ranks are in, or None if the observations do not prove one.

    Args:
        positions: the ranks of this node; all other ranks of `world_size` count as late.
    """
    ranks = ObservedRanks(positions, world_size)
    return _find_mismatch(ranks) or _find_circular_wait(ranks)


def _find_mismatch(ranks: ObservedRanks) -> Deadlock | None:
    """Find operations with the same sequence number in one group that can never complete one another."""
    places: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, records in ranks.records.items():
        for record in records:
            if not record.point_to_point:
                places.setdefault((record.group, record.sequence), {})[rank] = record
    found = []
    for (group, sequence), here in places.items():
        for one, other in combinations(here, 2):
            ours, theirs = here[one], here[other]
            if ours.completed and theirs.completed:
                continue  # nobody waits in it
            if can_meet(ours, theirs) or _times_out(ours) or _times_out(theirs):
                continue
            if not (_is_held_up(ranks, one, ours, other) or _is_held_up(ranks, other, theirs, one)):
                continue
            # the position of a backward's all-reduces is an estimate, valid only for a rank that was aborted
            # inside it
            if BACKWARD in (ours.operation, theirs.operation) and not {one, other} & ranks.exited:
                continue
            if share_group(one, ours, other, theirs):
                found.append((sequence, group, one, other))
    if not found:
        return None
    sequence, group, one, other = min(found)
    here = places[group, sequence]
    stuck = {rank: record for rank, record in here.items() if share_group(one, here[one], rank, record)}
    # one that was aborted by this mismatch is on its way out, or has exited: that does not tell which rank is
    # at fault, nor where it has called
    inside = {rank for rank, record in stuck.items() if _is_in(ranks, rank, record)}
    culprits = tuple(rank for rank in sorted(inside) if ranks.positions[rank].left_early)
    if len(culprits) in (0, len(stuck)):
        culprits = find_culprits(stuck, ranks.records, world_size=len(ranks.world))
    outside_training = {rank for rank in inside if ranks.positions[rank].outside_training}
    early = len(outside_training) < len(stuck) and len(culprits) > 0 and outside_training.issuperset(culprits)
    wrong = next((rank for rank in (one, other) if rank in culprits), one)
    right = next(rank for rank in stuck if not can_meet(stuck[wrong], stuck[rank]))
    mismatch = (
        f"{describe_operation(stuck[wrong])} against {describe_operation(stuck[right])}"
        f" at #{sequence} of group {group}"
    )
    cause = Cause.rank_exited_early if early else Cause.collective_mismatch
    return _deadlock(ranks, cause, culprits, stuck, mismatch=mismatch)


def _is_held_up(ranks: ObservedRanks, rank: int, here: Collective, other: int) -> bool:
    """Whether `rank` cannot go on without the part of `other` in the collective that it is in."""
    if here.completed:
        return False
    if {rank, other} & ranks.exited:
        return True  # one was aborted, so the other waits no more; the run has failed, the question is why
    needed = needed_members(rank, here)
    if needed is not None and other not in needed:
        return False
    return _is_in(ranks, rank, here)


def _is_in(ranks: ObservedRanks, rank: int, here: Collective) -> bool:
    return here.on_device or any(here in blocked.collectives for blocked in ranks.blocked.get(rank, ()))


def _find_circular_wait(ranks: ObservedRanks) -> Deadlock | None:
    """Find the largest set of ranks that wait for an exited rank, or for one another.

    A rank will never enqueue a missing collective if it has exited, or if each of its threads waits in this
    way.
    """
    stuck_threads = {thread for threads in ranks.blocked.values() for thread in threads}
    missing = {
        (blocked, here): ranks.missing_from(blocked.rank, here)
        for blocked in stuck_threads
        for here in blocked.collectives
    }

    def is_stuck(rank: int) -> bool:
        return rank in ranks.exited or (
            ranks.only_waits(rank) and all(thread in stuck_threads for thread in ranks.blocked[rank])
        )

    def is_held_up(blocked: BlockedThread, here: Collective) -> bool:
        late, all_needed = missing[blocked, here]
        stuck_peers = [is_stuck(rank) for rank in late]
        return bool(stuck_peers) and (all(stuck_peers) if all_needed else any(stuck_peers))

    while True:
        remaining = {
            blocked
            for blocked in stuck_threads
            if any(is_held_up(blocked, here) for here in blocked.collectives)
        }
        if len(remaining) == len(stuck_threads):
            break
        stuck_threads = remaining
    if not stuck_threads:
        return None
    stuck: dict[int, Collective] = {}
    waits = []
    for blocked in [blocked for rank in sorted(ranks.blocked) for blocked in ranks.blocked[rank]]:
        for here in blocked.collectives if blocked in stuck_threads else ():
            if is_held_up(blocked, here):
                stuck.setdefault(blocked.rank, here)
                waits += [(blocked.rank, rank) for rank in missing[blocked, here][0] if is_stuck(rank)]
    absent = {rank for _, rank in waits if rank in ranks.exited}
    # a rank without a fault neither exits inside training nor leaves a call early while another goes on in
    # it; that a script is over says nothing
    early_ones = {rank for rank in stuck if ranks.positions[rank].left_early}
    left = {rank for rank in absent if not ranks.positions[rank].outside_training}
    left |= {rank for waiter, rank in waits if ranks.positions[rank].left_early and waiter not in early_ones}
    if left:
        return _deadlock(ranks, Cause.rank_exited_early, tuple(sorted(left)), stuck, absent=left)
    unmet = {(waiter, rank) for waiter, rank in waits if rank in absent}
    culprits = find_culprits(stuck, ranks.records, world_size=len(ranks.world), unmet=unmet)
    if not absent:
        outside_training = {rank for rank in stuck if ranks.positions[rank].outside_training}
        absent = {
            rank for waiter, rank in waits if rank in outside_training and waiter not in outside_training
        }
    early = bool(absent) and absent.issuperset(culprits)
    cause = Cause.rank_exited_early if early else Cause.collective_missing_rank
    return _deadlock(ranks, cause, culprits, stuck, absent=absent)


def _times_out(record: Collective) -> bool:
    return record.timeout_seconds < MIN_TIMEOUT_SECONDS


def _deadlock(
    ranks: ObservedRanks,
    cause: Cause,
    culprits: tuple[int, ...],
    stuck: Mapping[int, Collective],
    *,
    mismatch: str | None = None,
    absent: AbstractSet[int] = frozenset(),
) -> Deadlock:
    at = ranks.current(stuck)
    locations = ranks.locations(at)
    sentence = describe_deadlock(stuck, culprits, locations, absent=absent, exited=ranks.exited)
    last_calls = describe_last_calls(_last_calls(ranks, stuck))
    return Deadlock(
        cause=cause,
        culprits=culprits,
        waiters=tuple(rank for rank in sorted(stuck) if rank not in culprits and rank not in ranks.exited),
        at=at,
        locations=locations,
        mismatch=mismatch,
        sentence=f"{sentence} {last_calls}" if last_calls else sentence,
    )


def _last_calls(ranks: ObservedRanks, stuck: Mapping[int, Collective]) -> dict[int, Collective]:
    """The last consensus call of each rank that is elsewhere while another rank is stuck in one."""
    if not any(here.group == CONSENSUS_GROUP for here in stuck.values()):
        return {}
    found = {}
    for rank, records in ranks.records.items():
        if rank in stuck and stuck[rank].group == CONSENSUS_GROUP:
            continue
        calls = [record for record in records if record.group == CONSENSUS_GROUP]
        if calls:
            found[rank] = calls[-1]
    return found
