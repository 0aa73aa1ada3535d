"""Positions of ranks: what they have enqueued, whom they miss, and which of their threads are blocked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import (
    MAIN_THREAD_IN_BACKWARD,
    ObservedRanks,
    Position,
    without_other_threads,
)

DONE, WAITING, ENQUEUED = (
    CollectiveProgress.completed,
    CollectiveProgress.waiting,
    CollectiveProgress.enqueued,
)


def collective(sequence: int, progress: CollectiveProgress = DONE, **changes: Any) -> Collective:
    """An all-reduce in the group `m`, of which thread 1 waits if any does."""
    fields: dict[str, Any] = {
        "group": "m", "sequence": sequence, "operation": "all_reduce", "sizes": ((7,),), "dtypes": ("Float",),
        "progress": progress, "thread": "1",
    }  # fmt: skip
    return Collective(**(fields | changes))


def observed(
    *records: tuple[Collective, ...] | None, world_size: int | None = None, **changes: Any
) -> ObservedRanks:
    """Ranks with these records; keyword arguments change the position of rank 0."""
    positions = {
        rank: Position(rank=rank, records=known, **(changes if rank == 0 else {}))
        for rank, known in enumerate(records)
    }
    return ObservedRanks(positions, world_size or len(records))


@pytest.mark.parametrize(
    ("records", "highest"),
    [
        ((), 0),
        ((collective(1), collective(2)), 2),
        ((collective(2), collective(1)), 2),
        ((collective(4, count=3),), 6),
        ((collective(4, count=0),), 3),
        ((collective(1), collective(9, group="n")), 1),
        ((collective(1), collective(9, operation="send", point_to_point=True)), 1),
        ((collective(1), collective(2, ENQUEUED, operation=BACKWARD)), 2),
    ],
)
def test_the_highest_number_counts_all_that_an_entry_stands_for(
    records: tuple[Collective, ...], highest: int
) -> None:
    """Of the same group, and without messages; an entry may stand for several collectives, or for none."""
    assert observed(records, ()).highest_sequence(0, collective(1), 1) == highest


def test_what_a_rank_has_issued_counts_where_no_record_is_left() -> None:
    """Of this group only."""
    assert observed((), (), issued={"m": 5, "n": 8}).highest_sequence(0, collective(1), 1) == 5
    assert observed((collective(2),), (), issued={"m": 5}).highest_sequence(0, collective(1), 1) == 2
    assert observed((), (), issued={"n": 8}).highest_sequence(0, collective(1), 1) == 0


@pytest.mark.parametrize("waiter", [0, 1, 2])
def test_whoever_waits_every_other_rank_of_an_unseen_group_is_a_candidate(waiter: int) -> None:
    """All of them must be stuck, and all must be observed."""
    here = collective(1, WAITING)
    records: list[tuple[Collective, ...] | None] = [(), (), ()]
    records[waiter] = (here,)
    others = tuple(rank for rank in range(3) if rank != waiter)
    assert observed(*records).missing_from(waiter, here) == (others, True)
    assert observed(*records, world_size=4).missing_from(waiter, here)[0] == ()
    records[others[0]] = None
    assert observed(*records).missing_from(waiter, here)[0] == ()


@pytest.mark.parametrize("waiter", [0, 1, 2])
def test_whoever_waits_the_ranks_seen_in_a_group_are_its_members(waiter: int) -> None:
    """One that has enqueued the collective too is not missing."""
    here = collective(2, WAITING)
    behind, ahead = (rank for rank in range(3) if rank != waiter)
    records: list[tuple[Collective, ...]] = [(), (), ()]
    records[waiter] = (collective(1), here)
    records[behind] = (collective(1),)
    assert observed(*records).missing_from(waiter, here) == ((behind,), False)
    for last in (2, 3):
        records[ahead] = (collective(1), collective(last))
        assert observed(*records).missing_from(waiter, here) == ((behind,), False)


@pytest.mark.parametrize("other", ["a", "z"])
def test_the_pending_first_collective_of_another_group_begins_no_group(other: str) -> None:
    """A member without a record of this group may have dropped it."""
    members = (0, 1)
    here = collective(3, WAITING, members=members)
    pending = collective(1, ENQUEUED, group=other, members=members)
    kept = (collective(8, group="n"),)
    assert observed((collective(2, members=members), pending, here), kept).missing_from(0, here)[0] == ()
    own = collective(1, ENQUEUED, members=members)
    assert observed((own, collective(2, members=members), here), kept).missing_from(0, here)[0] == (1,)


def test_a_thread_is_blocked_by_the_oldest_collective_that_it_waits_in() -> None:
    """Not by completed ones, messages, or those that fail by themselves."""
    first, second, other = collective(5, WAITING), collective(6, WAITING), collective(7, WAITING, thread="2")
    records = (
        collective(1), collective(2, WAITING, timeout_seconds=59.0), collective(3, ENQUEUED),
        collective(4, WAITING, group="s", operation="send", point_to_point=True), first, second, other,
    )  # fmt: skip
    blocked = observed(records).blocked[0]
    assert [(one.rank, one.thread, one.collectives) for one in blocked] == [
        (0, "1", (first,)), (0, "2", (other,)),
    ]  # fmt: skip


def test_a_backward_is_blocked_by_all_that_it_has_issued_on_the_host() -> None:
    """Collectives on a device block no thread of the host, nor does anything outside the backward pass."""
    one, two = (collective(number, ENQUEUED, in_backward=True) for number in (2, 3))
    device = collective(4, ENQUEUED, in_backward=True, on_device=True)
    records = (collective(1, ENQUEUED), one, two, device)
    blocked = observed(records, in_backward=True).blocked[0]
    assert [(thread.thread, thread.collectives) for thread in blocked] == [
        (MAIN_THREAD_IN_BACKWARD, (one, two))
    ]
    assert observed(records).blocked[0] == ()


@pytest.mark.parametrize(
    ("waiting", "only_waits"),
    [
        (frozenset({"1", "2"}), True), (frozenset({"1"}), False), (frozenset({"1", "2", "3"}), False),
        (frozenset({"1", "3"}), False), (frozenset(), False), (None, False),
    ],
)  # fmt: skip
def test_a_rank_only_waits_if_report_and_records_name_the_same_threads(
    waiting: frozenset[str] | None, only_waits: bool
) -> None:
    """A thread that only one of them names has gone on since, or waits where nothing is known."""
    records = (collective(1, WAITING), collective(2, WAITING, thread="2"))
    assert observed(records, waiting_threads=waiting).only_waits(0) is only_waits


def test_a_rank_that_has_exited_waits_for_nothing() -> None:
    """Nor does one that waits in no collective."""
    known = {"waiting_threads": frozenset({"1"})}
    gone = observed((collective(1, WAITING),), exited=True, **known)
    assert gone.exited == {0}
    assert not gone.only_waits(0)
    assert not observed((collective(1),), **known).only_waits(0)


def test_the_threads_that_are_assumed_to_wait_are_those_of_the_records() -> None:
    """And the main thread in a backward pass, if that has issued collectives."""
    records = (collective(1), collective(2, ENQUEUED, thread="5"), collective(3, WAITING, thread="2"))
    position = Position(rank=0, records=records, in_backward=True)
    assert without_other_threads(position).waiting_threads == {"2"}
    issued = replace(collective(4, ENQUEUED), in_backward=True)
    inside = replace(position, records=(*records, issued))
    assert without_other_threads(inside).waiting_threads == {"2", MAIN_THREAD_IN_BACKWARD}
    assert without_other_threads(replace(inside, in_backward=False)).waiting_threads == {"2"}
    assert without_other_threads(Position(rank=0, records=None)).waiting_threads == frozenset()


def test_members_that_one_record_names_are_those_of_the_group() -> None:
    """In ascending order; the default group has all ranks, and other groups are not affected."""
    known = observed(
        (collective(1), collective(2, members=(2, 0)), collective(1, group="0"), collective(1, group="n")),
        world_size=3,
    )
    assert [record.members for record in known.records[0]] == [(0, 2), (0, 2), (0, 1, 2), ()]


def test_a_group_with_two_numberings_is_left_out_on_every_rank() -> None:
    """Messages have numbers of their own and leave nothing out."""
    message = collective(9, operation="recv", point_to_point=True)
    doubtful = collective(1, group="n", point_to_point=True)
    ranks = observed((collective(1), message, collective(1, group="n")), (collective(1), doubtful))
    assert [[record.group for record in ranks.records[rank]] for rank in (0, 1)] == [["m", "m"], ["m"]]


def test_a_rank_is_at_the_collective_that_it_waits_in() -> None:
    """Else at its last one, which need not have completed; the proof may say that it is at another."""
    waits = collective(3, WAITING)
    ranks = observed(
        (collective(1), collective(2, ENQUEUED), waits, collective(4, ENQUEUED)),
        (collective(1), collective(2, ENQUEUED)),
        (),
        None,
    )
    at = ranks.current({})
    assert at == {0: waits, 1: collective(2, ENQUEUED), 2: None, 3: None}
    assert ranks.current({1: collective(1)})[1] == collective(1)
