"""Proof that ranks wait for one another forever, from the collectives that each of them has enqueued.

Called by `runtime.detection.deadlock_detector` with observations that have not changed over two polls, and by
the incident investigation. Uses no clock: a rank that is only late is never proof, and neither is a rank that
could not be observed. Does no I/O and finds no cause outside collectives. `culprit.py` decides which rank is
at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    can_meet,
    share_group,
)
from grpo_run.watchdog.deadlocks.culprit import find_culprits
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import BlockedThread, ObservedRanks, Position
from grpo_run.watchdog.deadlocks.sentences import describe_deadlock, describe_operation

MIN_TIMEOUT_SECONDS = 60.0
"""A collective with a shorter timeout is not a hang: the script expects that it may fail."""


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
                continue
            if can_meet(ours, theirs) or _times_out(ours) or _times_out(theirs):
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
    # an exited rank may have been aborted by this mismatch: its exit does not tell which rank is at
    # fault
    outside_training = tuple(rank for rank in stuck if ranks.positions[rank].outside_training)
    early = 0 < len(outside_training) < len(stuck)
    culprits = outside_training if early else find_culprits(stuck, ranks.records, world_size=len(ranks.world))
    wrong = next((rank for rank in (one, other) if rank in culprits), one)
    right = next(rank for rank in stuck if not can_meet(stuck[wrong], stuck[rank]))
    mismatch = (
        f"{describe_operation(stuck[wrong])} against {describe_operation(stuck[right])}"
        f" at #{sequence} of group {group}"
    )
    cause = Cause.rank_exited_early if early else Cause.collective_mismatch
    return _deadlock(ranks, cause, culprits, stuck, mismatch=mismatch)


def _find_circular_wait(ranks: ObservedRanks) -> Deadlock | None:
    """Find the largest set of ranks that wait for an exited rank, or for one another."""
    missing = {blocked: ranks.missing_from(blocked) for blocked in _blocked_threads(ranks)}
    stuck_threads = list(missing)

    def is_stuck(rank: int, blocked: BlockedThread) -> bool:
        return rank in ranks.exited or any(
            other.rank == rank and ranks.may_issue(other, blocked.collective) for other in stuck_threads
        )

    while True:
        remaining = []
        for blocked in stuck_threads:
            late, all_needed = missing[blocked]
            stuck_peers = [is_stuck(rank, blocked) for rank in late]
            if stuck_peers and (all(stuck_peers) if all_needed else any(stuck_peers)):
                remaining.append(blocked)
        if len(remaining) == len(stuck_threads):
            break
        stuck_threads = remaining
    if not stuck_threads:
        return None
    stuck: dict[int, Collective] = {}
    for blocked in stuck_threads:
        stuck.setdefault(blocked.rank, blocked.collective)
    waits = [
        (blocked.rank, rank)
        for blocked in stuck_threads
        for rank in missing[blocked][0]
        if is_stuck(rank, blocked)
    ]
    exited = {rank for _, rank in waits if rank in ranks.exited}
    if not exited:
        outside_training = {rank for rank in stuck if ranks.positions[rank].outside_training}
        exited = {
            rank for waiter, rank in waits if rank in outside_training and waiter not in outside_training
        }
    if exited:
        return _deadlock(ranks, Cause.rank_exited_early, tuple(sorted(exited)), stuck, exited=True)
    culprits = find_culprits(stuck, ranks.records, world_size=len(ranks.world))
    return _deadlock(ranks, Cause.collective_missing_rank, culprits, stuck)


def _blocked_threads(ranks: ObservedRanks) -> Iterator[BlockedThread]:
    """The oldest collective that each thread waits for.

    An enqueued collective without a waiter blocks no thread.
    """
    for rank, records in ranks.records.items():
        position = ranks.positions[rank]
        if rank in ranks.exited:
            continue
        pending = [r for r in records if not r.point_to_point and not r.completed and not _times_out(r)]
        waiting = [record for record in pending if record.progress is CollectiveProgress.waiting]
        if not waiting and position.idle and position.in_backward:
            waiting = pending[:1]
        threads = [BlockedThread(rank, record) for record in waiting]
        if any(not blocked.thread for blocked in threads):
            threads = threads[:1]
        seen: set[str] = set()
        for blocked in threads:
            if blocked.thread not in seen:
                seen.add(blocked.thread)
                yield blocked


def _times_out(record: Collective) -> bool:
    return record.timeout_seconds < MIN_TIMEOUT_SECONDS


def _deadlock(
    ranks: ObservedRanks,
    cause: Cause,
    culprits: tuple[int, ...],
    stuck: Mapping[int, Collective],
    *,
    mismatch: str | None = None,
    exited: bool = False,
) -> Deadlock:
    at = ranks.current(stuck)
    locations = ranks.locations(at)
    return Deadlock(
        cause=cause,
        culprits=culprits,
        waiters=tuple(rank for rank in sorted(stuck) if rank not in culprits and rank not in ranks.exited),
        at=at,
        locations=locations,
        mismatch=mismatch,
        sentence=describe_deadlock(stuck, culprits, locations, exited=exited, exited_ranks=ranks.exited),
    )
