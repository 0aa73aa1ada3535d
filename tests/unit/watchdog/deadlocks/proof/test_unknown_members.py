"""What is proved where the members of a group are known from its records only."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.builders.watchdog.collective_positions import (
    PAIR,
    PAST,
    VOTE,
    Call,
    after_exit,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads


def test_an_exited_rank_outside_the_group_is_not_awaited() -> None:
    """The members are known, or seen, and the exited rank is none of them."""
    pair: Call = ("pair", "all_reduce", 50, 2)
    early = ran([*PAST, pair], last=CollectiveProgress.completed)
    assert judge(ran([*PAST, pair, pair]), early, after_exit(PAST)) is None
    assert (
        judge(
            ran([*PAST, pair], members=(0, 1)), ran(PAST, last=CollectiveProgress.completed), after_exit(PAST)
        )
        is None
    )
    assert judge(ran([*PAST, pair]), ran(PAST, last=CollectiveProgress.completed), after_exit(PAST)) is None


@pytest.mark.parametrize("waiter", [0, 1])
def test_where_members_are_unknown_every_rank_seen_in_the_group_is_one(waiter: int) -> None:
    """One collective of a rank is enough, and the number of the rank does not matter."""
    waits = ran([*PAST, PAIR, PAIR])
    seen = Position(rank=0, records=ran([*PAST, PAIR], last=CollectiveProgress.completed), exited=True)
    other = ran(PAST, last=CollectiveProgress.completed)
    found = proved(*((waits, seen) if waiter == 0 else (seen, waits)), other)
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1 - waiter,))


@pytest.mark.parametrize("waiter", [0, 1])
def test_a_rank_seen_in_the_group_is_waited_for_although_another_is_not_observed(waiter: int) -> None:
    """The unobserved rank may be a member too, but the one that exited will never come."""
    waits = ran([*PAST, PAIR, PAIR])
    seen = Position(rank=0, records=ran([*PAST, PAIR], last=CollectiveProgress.completed), exited=True)
    assert proved(*((waits, seen) if waiter == 0 else (seen, waits)), None).culprits == (1 - waiter,)


def test_a_group_in_which_nobody_else_was_seen_needs_every_other_rank_stuck() -> None:
    """One of the others is a member; as long as one of them runs or cannot be seen, it may still come."""
    waits = ran([*PAST, PAIR])
    assert judge(waits, after_exit(PAST), after_exit(PAST)) is not None
    assert judge(waits, after_exit(PAST), ran(PAST, last=CollectiveProgress.completed)) is None
    assert judge(waits, after_exit(PAST), None) is None
    assert judge(waits, after_exit(PAST), world_size=3) is None


def test_a_ring_that_forgot_the_group_is_believed_for_the_groups_first_collective_only() -> None:
    """A rank without a record of the group has not entered it, unless the ring may have dropped the
    record.
    """
    first = ran([*PAST, PAIR], members=(0, 1))
    assert judge(first, after_exit(PAST)) is not None
    second = ran([*PAST, PAIR, PAIR], members=(0, 1))
    assert judge(second, after_exit(PAST)) is None
    assert judge(second, Position(rank=1, records=(), exited=True)) is not None


def test_a_group_whose_first_collective_is_pending_has_not_begun() -> None:
    """A member without a record of it has not come, whichever of its collectives is waited for."""
    begun = ran([*PAST, PAIR, PAIR], members=(0, 1))
    pending = (
        *begun[:-2],
        replace(begun[-2], progress=CollectiveProgress.enqueued, members=(0, 1)),
        begun[-1],
    )
    assert judge(pending, after_exit(PAST)) is not None
    assert judge(begun, after_exit(PAST)) is None


def test_what_a_rank_has_issued_is_known_where_its_records_are_dropped() -> None:
    """It started the group's first collective long ago, and waits for this rank elsewhere."""
    first = ran([*PAST, PAIR], members=(0, 1))
    votes = without_other_threads(Position(rank=1, records=ran([*PAST, VOTE])))
    assert judge(first, votes) is not None
    assert judge(first, replace(votes, issued={"pair": 1, "0": 6})) is None
