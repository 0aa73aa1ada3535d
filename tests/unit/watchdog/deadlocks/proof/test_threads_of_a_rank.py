"""A rank is stuck only if no thread of it may still act."""

from __future__ import annotations

from dataclasses import replace

from support.builders.watchdog.collective_positions import (
    GATHER,
    PAST,
    REDUCE,
    VOTE,
    Call,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position


def test_a_rank_with_a_thread_that_may_act_is_not_stuck() -> None:
    """The thread may serve the group that the other rank waits in, whether or not it has ever used it."""
    waits, votes = ran([*PAST, GATHER, REDUCE], thread="9"), ran([*PAST, GATHER, VOTE], thread="1")
    for threads, expected in (
        (frozenset({"1"}), True),
        (None, False),
        (frozenset(), False),
        (frozenset({"1", "2"}), False),
    ):
        found = judge(waits, Position(rank=1, records=votes, waiting_threads=threads))
        assert (found is not None) is expected


def test_a_thread_that_waits_where_nothing_is_known_keeps_its_rank_alive() -> None:
    """Its collective may complete: the group is excluded, or the collective has a time limit."""
    odd: Call = ("odd", "all_reduce", 40, 1)
    for change in ({"point_to_point": True}, {"timeout_seconds": 0.0}):
        calls = ran([*PAST, odd, GATHER, VOTE], thread="1")
        elsewhere = replace(calls[-3], progress=CollectiveProgress.waiting, thread="2", **change)
        votes = (*calls[:-3], elsewhere, *calls[-2:])
        known, unknown = (
            judge(
                ran([*PAST, GATHER, REDUCE], thread="9"),
                Position(rank=1, records=votes, waiting_threads=threads),
            )
            for threads in (frozenset({"1"}), frozenset({"1", "2"}))
        )
        assert known is not None
        assert unknown is None


def test_a_rank_whose_other_thread_will_go_on_is_not_stuck() -> None:
    """One thread waits for the other rank; the other waits in a collective that all have enqueued."""
    served: Call = ("side", "all_reduce", 40, 1)
    both = ran([*PAST, served, GATHER, VOTE], thread="1")
    both = (*both[:-3], replace(both[-3], progress=CollectiveProgress.waiting, thread="2"), *both[-2:])
    threads = frozenset({"1", "2"})
    waits = ran([*PAST, served, GATHER, REDUCE], thread="9")
    assert judge(waits, Position(rank=1, records=both, waiting_threads=threads)) is None
    late = ran([*PAST, GATHER, REDUCE], thread="9")
    assert judge(late, Position(rank=1, records=both, waiting_threads=threads)) is not None


def test_where_a_thread_is_unknown_only_the_oldest_wait_counts() -> None:
    """The later record may belong to the same thread, which would enqueue it only after the first
    completes.
    """
    waits = ran([*PAST, GATHER, VOTE], thread="vote")
    both = (*waits[:-2], replace(waits[-2], progress=CollectiveProgress.waiting), waits[-1])
    assert judge(both, ran([*PAST, GATHER, REDUCE])) is None


def test_every_known_thread_that_waits_is_blocked() -> None:
    """The first thread's collective will complete; the second waits for a rank that has exited."""
    calls: list[Call] = [("x", "all_reduce", 10, 1), ("y", "all_reduce", 20, 1)]
    waits = tuple(
        replace(record, members=(0, 1), thread=record.group, progress=CollectiveProgress.waiting)
        for record in ran(calls)
    )
    peer = tuple(
        replace(record, members=(0, 1)) for record in ran(calls[:1], last=CollectiveProgress.completed)
    )
    assert proved(waits, Position(rank=1, records=peer, exited=True)).culprits == (1,)
