"""Ranks that wait for each other, or for one that does, are stuck."""

from __future__ import annotations

import pytest
from support.builders.watchdog.collective_positions import (
    GATHER,
    PAST,
    REDUCE,
    VOTE,
    Call,
    after_exit,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress


def test_a_collective_with_a_short_timeout_is_no_circular_wait() -> None:
    """It does not wait for an exited rank either."""
    asks = ran([*PAST, GATHER, REDUCE], timeout_seconds=5.0)
    assert judge(asks, ran([*PAST, GATHER, VOTE])) is None
    assert judge(ran([*PAST, GATHER, REDUCE], timeout_seconds=60.0), ran([*PAST, GATHER, VOTE])) is not None
    assert judge(after_exit(PAST), ran([*PAST, GATHER], timeout_seconds=5.0)) is None
    assert judge(after_exit(PAST), ran([*PAST, GATHER], timeout_seconds=60.0)) is not None


def test_a_skipped_last_collective_is_a_circular_wait_with_the_vote() -> None:
    """The rank votes while the others reduce; each waits for the other."""
    found = proved(ran([*PAST, GATHER, REDUCE]), ran([*PAST, GATHER, VOTE]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_missing_rank, (1,), (0,))
    assert found.mismatch is None
    assert found.sentence == (
        "Deadlock: rank 1 is in all_reduce (train.py:12, #4 of group grpo_run/vote) while rank 0 is in "
        "all_reduce (train.py:91, #8)."
    )


def test_a_circular_wait_with_rank_zero_at_fault() -> None:
    """Analysis that takes rank 0 as reference would blame the three others."""
    right = ran([*PAST, GATHER, REDUCE])
    found = proved(ran([*PAST, GATHER, VOTE]), right, right, right)
    assert (found.culprits, found.waiters) == ((0,), (1, 2, 3))


def test_two_groups_in_opposite_order_are_a_circular_wait() -> None:
    """Before any common step it is a deadlock without a culprit."""
    one, two = ("a", "all_reduce", 10, 1), ("b", "all_reduce", 11, 1)
    found = proved(ran([one]), ran([two]))
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, ())
    assert found.sentence.endswith("; the records do not tell which is at fault.")


def test_ranks_that_wait_for_a_stuck_rank_are_stuck_too() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which has exited."""
    pair = ran([*PAST, ("pair", "all_reduce", 50, 2)], members=(0, 1))
    found = proved(pair, ran([*PAST, GATHER]), after_exit(PAST))
    assert (found.culprits, found.waiters) == ((2,), (0, 1))


def test_a_broadcast_waits_for_its_root_only() -> None:
    """It may complete on a rank before the other receivers have come."""
    call: Call = ("0", "broadcast", 40, 3)
    waits = ran([*PAST, call], root=0)
    votes, late = ran([*PAST, VOTE]), ran(PAST, last=CollectiveProgress.completed)
    assert judge(votes, waits, late) is not None
    assert judge(late, waits, votes) is None
    assert judge(waits, votes, late) is None
    assert judge(votes, ran([*PAST, call]), late) is None


@pytest.mark.parametrize("operation", ["gather", "scatter", "all_to_all", "broadcast", "reduce"])
def test_an_operation_that_may_complete_alone_is_no_circle(operation: str) -> None:
    """It may move nothing between two ranks, or nothing that the receiver must wait for."""
    assert judge(ran([*PAST, ("0", operation, 40, 3)]), ran([*PAST, VOTE])) is None


def test_a_reduction_without_elements_is_no_circle() -> None:
    """Gloo completes it without communication."""
    assert judge(ran([*PAST, ("0", "all_reduce", 40, 0)]), ran([*PAST, VOTE])) is None
    assert judge(ran([*PAST, ("0", "barrier", 40, 0)]), ran([*PAST, VOTE])) is not None


def test_a_receiver_is_held_up_by_its_root_only() -> None:
    """What another receiver has enqueued in that place does not concern it, as long as nobody waits for
    that.
    """
    waits = ran([*PAST, ("0", "broadcast", 40, 3)], root=0)
    other = ran([*PAST, GATHER], last=CollectiveProgress.enqueued)
    late = ran(PAST, last=CollectiveProgress.completed)
    assert judge(late, waits, other) is None
    assert proved(other, waits, late).cause is Cause.collective_mismatch
