"""A backward pass waits for what C++ has issued in it, and for nothing else."""

from __future__ import annotations

from dataclasses import replace

from support.builders.watchdog.collective_positions import (
    GATHER,
    PAST,
    REDUCE,
    VOTE,
    Call,
    in_backward,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads


def test_a_main_thread_that_sleeps_in_a_backward_is_blocked() -> None:
    """C++ waits for gradients without a log entry."""
    stuck = in_backward([*PAST, GATHER, REDUCE])
    votes = ran([*PAST, GATHER, VOTE])
    found = proved(stuck, votes)
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, (1,))
    assert judge(replace(stuck, in_backward=False), votes) is None
    assert judge(replace(stuck, waiting_threads=None), votes) is None


def test_a_pending_vote_does_not_block_a_backward() -> None:
    """It was started before the backward pass and is collected later; only what C++ issued counts."""
    records = ran([*PAST, VOTE], last=CollectiveProgress.enqueued)
    busy = without_other_threads(Position(rank=0, records=records, in_backward=True))
    assert judge(busy, ran([*PAST, GATHER])) is None


def test_a_backward_that_completed_was_enqueued() -> None:
    """The exited rank reduced its gradients, so nobody waits for it there."""
    backward: Call = ("0", BACKWARD, 70, 7)
    done = Position(rank=1, records=ran([*PAST, backward], last=CollectiveProgress.completed), exited=True)
    assert judge(ran([*PAST, REDUCE]), done) is None


def test_a_backward_waits_for_all_that_it_has_issued() -> None:
    """The first bucket is reduced by all ranks, the second one is missing."""
    stuck = in_backward([*PAST, GATHER, REDUCE, REDUCE], reduced=2)
    assert judge(stuck, ran([*PAST, GATHER, REDUCE, VOTE])) is not None
    assert judge(stuck, ran([*PAST, GATHER, REDUCE, REDUCE])) is None
