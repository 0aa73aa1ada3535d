"""Positions of ranks in their collectives: the input of a proof, and the questions that a proof asks of it.

Used by `proof.py`. Pure. A rank that could not be observed takes part in no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    DEFAULT_GROUP,
    Collective,
    CollectiveProgress,
    share_group,
)
from grpo_run.watchdog.verdict import Location


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where one rank is.

    `records` are its collectives, oldest first; None if it could not be observed. `exited`: its process has
    exited. `outside_training`: it is outside `train()`. `idle`: its main thread used no CPU time between two
    polls. `in_backward`: its innermost phase is `forward_backward`. `stack_location` is its line where a
    record has none.
    """

    rank: int
    records: tuple[Collective, ...] | None
    exited: bool = False
    outside_training: bool = False
    idle: bool = False
    in_backward: bool = False
    stack_location: Location | None = None


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """A thread of `rank` that cannot continue before `collective` completes."""

    rank: int
    collective: Collective

    @property
    def thread(self) -> str:
        """The blocked thread; empty if unknown."""
        return self.collective.waiter or self.collective.thread


class ObservedRanks:
    """The observed ranks, with the members of their process groups filled in as far as known."""

    def __init__(self, positions: Mapping[int, Position], world_size: int) -> None:
        self.world = tuple(range(world_size))
        self.positions = {rank: positions[rank] for rank in sorted(positions)}
        observed = {
            rank: _with_members(position.records, self.world)
            for rank, position in self.positions.items()
            if position.records is not None
        }
        # a group with two backends has two numberings under one name, on every rank, even where only one was
        # seen
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
        self.exited = frozenset(rank for rank in self.records if self.positions[rank].exited)

    def highest_sequence(self, rank: int, like: Collective, its_rank: int) -> int:
        """The highest sequence number that `rank` enqueued in the group of `like`; 0 for none.

        Args:
            its_rank: the rank of `like`.
        """
        return max(
            (
                record.sequence
                for record in self.records[rank]
                if not record.point_to_point
                and share_group(rank, record, its_rank, like)
                # a rank that exited before the first all-reduce of its backward never enqueued it
                and not (rank in self.exited and record.operation == BACKWARD and not record.completed)
            ),
            default=0,
        )

    def missing_from(self, blocked: BlockedThread) -> tuple[tuple[int, ...], bool]:
        """Observed ranks that have not enqueued a blocked collective, and whether all of them must be stuck.

        If a group's members are unknown, they are the ranks that have used it. If no other rank has, at least
        one more rank is a member; then the thread is stuck only if every candidate is.
        """
        here, rank = blocked.collective, blocked.rank
        if here.members:
            peers, all_needed = here.members, False
        else:
            peers = tuple(r for r in self.records if r != rank and self.highest_sequence(r, here, rank) > 0)
            all_needed = not peers
            peers = peers or self.world
        others = tuple(peer for peer in peers if peer != rank)
        if all_needed and not all(peer in self.records for peer in others):
            return (), True
        missing = tuple(
            r
            for r in others
            if r in self.records
            and self.highest_sequence(r, here, rank) < here.sequence
            # every member enqueued the earlier collectives: a member without a record of the group no longer
            # retains them. This is not assumed for a group's first collective; the log holds hundreds
            and (here.sequence == 1 or not self.records[r] or self.highest_sequence(r, here, rank) > 0)
        )
        return missing, all_needed

    def may_issue(self, blocked: BlockedThread, collective: Collective) -> bool:
        """Whether the blocked thread may be the one that issues collectives in the group of `collective`."""
        threads = {
            record.thread
            for record in self.records[blocked.rank]
            if record.group == collective.group and not record.point_to_point
        }
        return not blocked.thread or not threads or bool(threads & {"", blocked.thread})

    def current(self, stuck: Mapping[int, Collective]) -> dict[int, Collective | None]:
        """The collective of every rank: as given in `stuck`, else the one it waits for, else its last one."""
        found: dict[int, Collective | None] = {}
        for rank in self.positions:
            records = self.records.get(rank, ())
            last = next(
                (record for record in records if record.progress is CollectiveProgress.waiting),
                records[-1] if records else None,
            )
            found[rank] = stuck.get(rank, last)
        return found

    def locations(self, current: Mapping[int, Collective | None]) -> dict[int, Location]:
        """The line of every rank for which one is known."""
        found = {}
        for rank, here in current.items():
            location = (here.location if here else None) or self.positions[rank].stack_location
            if location:
                found[rank] = location
        return found


def _with_members(records: tuple[Collective, ...], world: tuple[int, ...]) -> tuple[Collective, ...]:
    """Add the members of a group to all its records if any of them has them."""
    members = {DEFAULT_GROUP: world} | {r.group: tuple(sorted(r.members)) for r in records if r.members}
    return tuple(replace(r, members=members[r.group]) if r.group in members else r for r in records)
