"""Positions of ranks in their collectives: the input of a proof, and the questions that a proof asks of it.

`with_threads` adds what the threads of a rank may still do, by its own report. Used by `proof.py`. Pure. A
rank that could not be observed takes part in no answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pydantic import BaseModel, ConfigDict

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    DEFAULT_GROUP,
    Collective,
    CollectiveProgress,
    needed_members,
    share_group,
)
from grpo_run.watchdog.verdict import Location

MIN_TIMEOUT_SECONDS = 60.0
"""A collective with a shorter timeout is not a hang: the script expects that it may fail."""
MAIN_THREAD_IN_BACKWARD = "backward"
"""Stands for the main thread while it waits in C++ for the collectives of a DDP backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where one rank is.

    `records` are its collectives, oldest first; None if it could not be observed. `waiting_threads` are its
    threads that wait in collectives, if no other thread of the rank can ever issue a collective or end a
    wait; None if another thread may, or if that is not known. `issued` is how many collectives it has issued
    in each group that Python has used, as far as known. `exited`: its process has exited.
    `outside_training`: it is outside `train()`, or its script was over when it exited. `left_early`: it has
    left its last `train()` call before that call's last step. `in_backward`: its main thread is asleep in C++
    code of a DDP backward pass. `stack_location` is its line where a record has none.
    """

    rank: int
    records: tuple[Collective, ...] | None
    waiting_threads: frozenset[str] | None = None
    issued: Mapping[str, int] = field(default_factory=dict)
    exited: bool = False
    outside_training: bool = False
    left_early: bool = False
    in_backward: bool = False
    stack_location: Location | None = None


def without_other_threads(position: Position) -> Position:
    """The position of a rank whose every thread is assumed to wait in a collective.

    If even this proves no deadlock, the rank's threads need not be asked for.
    """
    records = position.records or ()
    threads = {record.thread for record in records if record.progress is CollectiveProgress.waiting}
    # in a forward and backward pass a script may also wait in a collective of its own
    if position.in_backward and any(record.in_backward and not record.completed for record in records):
        threads.add(MAIN_THREAD_IN_BACKWARD)
    return replace(position, waiting_threads=frozenset(threads))


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """A thread of `rank` that cannot continue before all of `collectives` have completed."""

    rank: int
    thread: str
    collectives: tuple[Collective, ...]


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
        self.blocked = {
            rank: _blocked_threads(self.positions[rank], records)
            for rank, records in self.records.items()
            if rank not in self.exited
        }

    def only_waits(self, rank: int) -> bool:
        """Whether each thread of a running rank that could issue a collective waits in one that is known."""
        threads = self.positions[rank].waiting_threads
        return bool(threads) and threads == frozenset(
            blocked.thread for blocked in self.blocked.get(rank, ())
        )

    def highest_sequence(self, rank: int, like: Collective, its_rank: int) -> int:
        """The highest sequence number that `rank` enqueued in the group of `like`; 0 for none.

        Args:
            its_rank: the rank of `like`.
        """
        recorded = (
            record.sequence + record.count - 1
            for record in self.records[rank]
            if not record.point_to_point
            and share_group(rank, record, its_rank, like)
            # a rank that exited before the first all-reduce of its backward never enqueued it
            and not (rank in self.exited and record.operation == BACKWARD and not record.completed)
        )
        return max(recorded, default=self.positions[rank].issued.get(like.group, 0))

    def missing_from(self, rank: int, here: Collective) -> tuple[tuple[int, ...], bool]:
        """Observed ranks that `rank` needs and that have not enqueued its collective, and whether all of them
        must be stuck.

        If a group's members are unknown, they are the ranks that have used it. If no other rank has, at least
        one more rank is a member; then the thread is stuck only if every candidate is.
        """
        needed, all_needed = needed_members(rank, here), False
        if needed is None:
            needed = tuple(r for r in self.records if r != rank and self.highest_sequence(r, here, rank) > 0)
            all_needed = not needed
            needed = needed or tuple(other for other in self.world if other != rank)
        if all_needed and not all(peer in self.records for peer in needed):
            return (), True
        # once a group's first collective is complete, every member has enqueued it: a member without a record
        # of the group no longer retains it. Before, it has not come; its log holds hundreds
        begins = here.sequence == 1 or any(
            record.group == here.group and record.sequence == 1 and not record.completed
            for record in self.records[rank]
        )
        missing = tuple(
            r
            for r in needed
            if r in self.records
            and self.highest_sequence(r, here, rank) < here.sequence
            and (begins or not self.records[r] or self.highest_sequence(r, here, rank) > 0)
        )
        return missing, all_needed

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


def _blocked_threads(position: Position, records: tuple[Collective, ...]) -> tuple[BlockedThread, ...]:
    """The threads of a rank that are blocked until collectives complete.

    An enqueued collective without a waiter blocks no thread. A thread waits for its oldest collective, and
    the main thread in a backward pass for all that C++ has issued.
    """
    waits: dict[str, list[Collective]] = {}
    for record in records:
        if record.point_to_point or record.completed or record.timeout_seconds < MIN_TIMEOUT_SECONDS:
            continue
        if record.progress is CollectiveProgress.waiting:
            waits.setdefault(record.thread, [record])
        elif position.in_backward and record.in_backward and not record.on_device:
            waits.setdefault(MAIN_THREAD_IN_BACKWARD, []).append(record)
    return tuple(
        BlockedThread(position.rank, thread, tuple(collectives)) for thread, collectives in waits.items()
    )


def _with_members(records: tuple[Collective, ...], world: tuple[int, ...]) -> tuple[Collective, ...]:
    """Add the members of a group to all its records if any of them has them."""
    members = {DEFAULT_GROUP: world} | {r.group: tuple(sorted(r.members)) for r in records if r.members}
    return tuple(
        r if members.get(r.group, r.members) == r.members else replace(r, members=members[r.group])
        for r in records
    )


THREADS_HANDLER = "grpo_run_threads"
"""Name of the handler of torch's worker server that answers with a report."""


class ThreadReport(BaseModel):
    """The threads of one rank at one instant. Threads that never issue collectives are left out.

    `waiting` are the threads that wait in a collective of the log, without a time limit of their own.
    `passive` are those that only another thread of this process can wake. Both have the thread's number of
    context switches, which does not change while it sleeps. `active` describes every other thread.
    `in_backward`: the main thread is in C++ code of a DDP backward pass, with this number of context
    switches. `issued` is how many collectives the rank has issued in each group that Python has used.
    `uses_futures`: the completion of a collective may run code of the script. `at` is the line of the script
    in which the main thread is: `train.py:88 in reward`.
    """

    model_config = ConfigDict(frozen=True)

    waiting: Mapping[str, int]
    passive: Mapping[str, int]
    active: tuple[str, ...]
    in_backward: int | None
    issued: Mapping[str, int]
    uses_futures: bool
    at: str = ""


def with_threads(position: Position, report: ThreadReport | None) -> Position:
    """The position of a rank with what it reports about its threads."""
    if report is None or position.exited:
        return replace(position, waiting_threads=None, in_backward=False)
    waiting = set(report.waiting)
    in_backward = position.in_backward and report.in_backward is not None
    if in_backward:
        waiting.add(MAIN_THREAD_IN_BACKWARD)
    # a collective in memory has no future
    pending = {record for record in position.records or () if not record.completed and not record.in_memory}
    continues = report.uses_futures and any(
        record.thread not in report.waiting or record.point_to_point for record in pending
    )
    may_act = report.active or continues or (report.in_backward is not None and not in_backward)
    return replace(
        position,
        waiting_threads=None if may_act else frozenset(waiting),
        issued={**position.issued, **report.issued},
        in_backward=in_backward,
    )
