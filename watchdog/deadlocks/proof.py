"""Proof that training ranks wait for one another forever, from the collectives each of them enqueued.

Called by the supervisor's watch with what it saw of every rank, unchanged over two looks; the answer becomes a
verdict. Needs no clock: what is only late is never proof, nor is a rank that could not be observed. Does no I/O
and finds no cause outside collectives; who is at fault is decided by `culprit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    DEFAULT_GROUP,
    Collective,
    Progress,
    can_meet,
    share_group,
)
from grpo_run.watchdog.deadlocks.culprit import find_culprits
from grpo_run.watchdog.deadlocks.sentences import operands, sentence
from grpo_run.watchdog.verdict import Location


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where one rank is.

    `records` are its collectives, oldest first; None when it could not be observed. `gone`: its process ended or
    its script's last line has run. `left_training`: it is out of `train()`. `idle`: its main thread used no CPU
    time between two looks. `in_backward`: its innermost phase is `forward_backward`. `stack_location` is its
    line where a record has none.
    """

    rank: int
    records: tuple[Collective, ...] | None
    gone: bool = False
    left_training: bool = False
    idle: bool = False
    in_backward: bool = False
    stack_location: Location | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlock:
    """A proved deadlock. `culprits` is empty when the records do not tell who is wrong.

    `at` is the collective in which each observed rank stands, or its last one; `mismatch` puts the two operations
    that cannot meet side by side.
    """

    cause: Cause
    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    at: Mapping[int, Collective | None]
    locations: Mapping[int, Location]
    mismatch: str | None
    sentence: str


@dataclass(frozen=True, slots=True)
class _Block:
    """A thread of `rank` that cannot go on before `collective` completes."""

    rank: int
    collective: Collective


def prove(positions: Mapping[int, Position], *, world_size: int) -> Deadlock | None:
    """The deadlock these ranks are in, or None if what is seen does not prove one.

    `positions` holds the ranks of this node; others of `world_size` count as late.
    """
    ranks = _Ranks(positions, world_size)
    return _mismatched(ranks) or _waiting_in_circles(ranks)


class _Ranks:
    """The observed ranks, with the members of their groups filled in as far as they are known."""

    def __init__(self, positions: Mapping[int, Position], world_size: int) -> None:
        self.world = tuple(range(world_size))
        self.positions = {rank: positions[rank] for rank in sorted(positions)}
        observed = {
            rank: _with_members(position.records, self.world)
            for rank, position in self.positions.items()
            if position.records is not None
        }
        # a group of two backends is numbered twice under one name, on every rank, also where only one has been seen
        ambiguous = {
            record.group
            for records in observed.values()
            for record in records
            if record.point_to_point and not record.operation.startswith(("send", "recv"))
        }
        self.records = {
            rank: tuple(record for record in records if record.group not in ambiguous)
            for rank, records in observed.items()
        }
        self.gone = frozenset(rank for rank in self.records if self.positions[rank].gone)

    def highest(self, rank: int, like: Collective, its_rank: int) -> int:
        """The highest sequence `rank` enqueued in the group of `like`, a record of `its_rank`; 0 for none."""
        return max(
            (
                record.sequence
                for record in self.records[rank]
                if not record.point_to_point
                and share_group(rank, record, its_rank, like)
                # A rank that ended before its backward's first all-reduce never enqueued it.
                and not (rank in self.gone and record.operation == BACKWARD and _open(record))
            ),
            default=0,
        )

    def awaited(self, block: _Block) -> tuple[tuple[int, ...], bool]:
        """The observed ranks that have not enqueued the block's collective, and whether all must be held up.

        Where a group's members are not known they are those seen in it. If no other rank was, one rank more at
        least is a member, and only when no rank is left that could be it does the block hold.
        """
        here, rank = block.collective, block.rank
        if here.members:
            peers, all_needed = here.members, False
        else:
            peers = tuple(r for r in self.records if r != rank and self.highest(r, here, rank) > 0)
            all_needed = not peers
            peers = peers or self.world
        others = tuple(peer for peer in peers if peer != rank)
        if all_needed and not all(peer in self.records for peer in others):
            return (), True
        late = tuple(
            r
            for r in others
            if r in self.records
            and self.highest(r, here, rank) < here.sequence
            # All members enqueued what preceded: one that has no record of the group has forgotten them.
            # Of a group's first collective this is not assumed; a ring holds hundreds.
            and (here.sequence == 1 or not self.records[r] or self.highest(r, here, rank) > 0)
        )
        return late, all_needed

    def binds(self, block: _Block, awaited: Collective) -> bool:
        """Whether a blocked thread is one that issues collectives in the group of `awaited`, or may be."""
        threads = {
            record.thread
            for record in self.records[block.rank]
            if record.group == awaited.group and not record.point_to_point
        }
        blocked = _thread(block.collective)
        return not blocked or not threads or bool(threads & {"", blocked})

    def at(self, stands: Mapping[int, Collective]) -> dict[int, Collective | None]:
        """Where every rank stands: as given, else what it waits for, else its last collective."""
        found: dict[int, Collective | None] = {}
        for rank in self.positions:
            records = self.records.get(rank, ())
            last = next(
                (r for r in records if r.progress is Progress.waiting), records[-1] if records else None
            )
            found[rank] = stands.get(rank, last)
        return found

    def locations(self, at: Mapping[int, Collective | None]) -> dict[int, Location]:
        """The line of every rank that has one."""
        found = {}
        for rank, here in at.items():
            location = (here.location if here else None) or self.positions[rank].stack_location
            if location:
                found[rank] = location
        return found


PATIENCE_SECONDS = 60.0
"""A collective with a shorter timeout of its own is a question, not a hang: the script means to hear that it failed."""


def _open(record: Collective) -> bool:
    return record.progress is not Progress.completed


def _ends(record: Collective) -> bool:
    return record.timeout_seconds < PATIENCE_SECONDS


def _thread(record: Collective) -> str:
    return record.waiter or record.thread


def _with_members(records: tuple[Collective, ...], world: tuple[int, ...]) -> tuple[Collective, ...]:
    """Records with their groups' members where any record of the same group has them."""
    members = {DEFAULT_GROUP: world} | {r.group: tuple(sorted(r.members)) for r in records if r.members}
    return tuple(replace(r, members=members[r.group]) if r.group in members else r for r in records)


def _mismatched(ranks: _Ranks) -> Deadlock | None:
    """Operations at one place of one group that can never complete one another."""
    places: dict[tuple[str, int], dict[int, Collective]] = {}
    for rank, records in ranks.records.items():
        for record in records:
            if not record.point_to_point:
                places.setdefault((record.group, record.sequence), {})[rank] = record
    found = []
    for (group, sequence), here in places.items():
        for one, other in combinations(here, 2):
            ours, theirs = here[one], here[other]
            if not (_open(ours) or _open(theirs)) or can_meet(ours, theirs) or _ends(ours) or _ends(theirs):
                continue
            # where a backward will all-reduce is a guess, good enough only for a rank that was aborted inside it
            if BACKWARD in (ours.operation, theirs.operation) and not {one, other} & ranks.gone:
                continue
            if share_group(one, ours, other, theirs):
                found.append((sequence, group, one, other))
    if not found:
        return None
    sequence, group, one, other = min(found)
    here = places[group, sequence]
    stands = {rank: record for rank, record in here.items() if share_group(one, here[one], rank, record)}
    # a rank that is gone may have been aborted by this very mismatch: its end says nothing about who was wrong
    left = tuple(r for r in stands if ranks.positions[r].left_training)
    early = 0 < len(left) < len(stands)
    culprits = left if early else find_culprits(stands, ranks.records, world_size=len(ranks.world))
    wrong = next((r for r in (one, other) if r in culprits), one)
    right = next(r for r in stands if not can_meet(stands[wrong], stands[r]))
    against = f"{operands(stands[wrong])} against {operands(stands[right])} at #{sequence} of group {group}"
    cause = Cause.rank_exited_early if early else Cause.collective_mismatch
    return _deadlock(ranks, cause, culprits, stands, mismatch=against)


def _blocks(ranks: _Ranks) -> Iterator[_Block]:
    """The oldest collective each thread waits for; a started operation that nobody waits for blocks no one."""
    for rank, records in ranks.records.items():
        position = ranks.positions[rank]
        if rank in ranks.gone:
            continue
        shared = [r for r in records if not r.point_to_point and _open(r) and not _ends(r)]
        waiting = [record for record in shared if record.progress is Progress.waiting]
        if not waiting and position.idle and position.in_backward:
            waiting = shared[:1]
        if any(not _thread(record) for record in waiting):
            waiting = waiting[:1]
        seen: set[str] = set()
        for record in waiting:
            if _thread(record) not in seen:
                seen.add(_thread(record))
                yield _Block(rank, record)


def _waiting_in_circles(ranks: _Ranks) -> Deadlock | None:
    """Ranks that wait for one that has left, or for one another: the greatest set that holds itself up."""
    awaited = {block: ranks.awaited(block) for block in _blocks(ranks)}
    stuck = list(awaited)

    def held_up(rank: int, block: _Block) -> bool:
        return rank in ranks.gone or any(
            other.rank == rank and ranks.binds(other, block.collective) for other in stuck
        )

    while True:
        remaining = []
        for block in stuck:
            late, all_needed = awaited[block]
            held = [held_up(rank, block) for rank in late]
            if held and (all(held) if all_needed else any(held)):
                remaining.append(block)
        if len(remaining) == len(stuck):
            break
        stuck = remaining
    if not stuck:
        return None
    stands: dict[int, Collective] = {}
    for block in stuck:
        stands.setdefault(block.rank, block.collective)
    waits = [(block.rank, rank) for block in stuck for rank in awaited[block][0] if held_up(rank, block)]
    left = {rank for _, rank in waits if rank in ranks.gone}
    if not left:
        away = {rank for rank in stands if ranks.positions[rank].left_training}
        left = {rank for waiter, rank in waits if rank in away and waiter not in away}
    if left:
        return _deadlock(ranks, Cause.rank_exited_early, tuple(sorted(left)), stands, left=True)
    culprits = find_culprits(stands, ranks.records, world_size=len(ranks.world))
    return _deadlock(ranks, Cause.collective_missing_rank, culprits, stands)


def _deadlock(
    ranks: _Ranks,
    cause: Cause,
    culprits: tuple[int, ...],
    stands: Mapping[int, Collective],
    *,
    mismatch: str | None = None,
    left: bool = False,
) -> Deadlock:
    at = ranks.at(stands)
    locations = ranks.locations(at)
    return Deadlock(
        cause=cause,
        culprits=culprits,
        waiters=tuple(rank for rank in sorted(stands) if rank not in culprits and rank not in ranks.gone),
        at=at,
        locations=locations,
        mismatch=mismatch,
        sentence=sentence(stands, culprits, locations, left=left, gone=ranks.gone),
    )
