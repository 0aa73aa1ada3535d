"""A rank that has left for good, and that others wait for, is the culprit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.builders.watchdog.collective_positions import (
    GATHER,
    LATER,
    PAST,
    REDUCE,
    Call,
    after_exit,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads


def test_a_rank_that_has_exited_is_the_culprit() -> None:
    """Its script has run its last line while the others wait for it."""
    found = proved(ran([*PAST, GATHER]), after_exit(PAST), ran([*PAST, GATHER]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0, 2))
    assert found.sentence == (
        "Deadlock: rank 1 has exited while ranks 0 and 2 wait for it in all_gather (train.py:88, #7)."
    )


ASK: Call = ("grpo_run/consensus", "all_gather", 40, 33)


def test_a_rank_that_left_a_consensus_loop_for_a_collective_is_named_with_its_last_call() -> None:
    """Both lines, and how often each rank has called."""
    found = proved(ran([ASK] * 5), ran([*[ASK] * 4, GATHER]))
    assert (found.cause, found.culprits) == (Cause.collective_missing_rank, (1,))
    assert found.sentence == (
        "Deadlock: rank 1 is in all_gather (train.py:88, #1) while rank 0 is in consensus (train.py:40,"
        " call 5). The last consensus call of rank 1 was call 4 at train.py:40."
    )


def test_a_rank_that_left_a_consensus_loop_for_the_end_is_named_with_its_last_call() -> None:
    """Its script has run its last line."""
    found = proved(ran([ASK, ASK]), after_exit([ASK]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert found.sentence == (
        "Deadlock: rank 1 has exited while rank 0 waits for it in consensus (train.py:40, call 2)."
        " The last consensus call of rank 1 was call 1 at train.py:40."
    )


def test_a_rank_that_outside_training_and_waits_elsewhere_exited_early() -> None:
    """It waits in another group while the others continue training."""
    away = without_other_threads(
        Position(rank=0, records=ran([*PAST, ("end", "barrier", 120, 0)]), outside_training=True)
    )
    found = proved(ran([*PAST, GATHER]), away)
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))
    assert found.sentence.startswith(
        "Deadlock: rank 1 has left training while rank 0 waits for it in all_gather"
    )


def test_a_rank_that_exited_before_its_backward_reduced_is_missing() -> None:
    """The entry of a backward says that DDP will reduce; a rank that exited before that never enqueued it."""
    backward: Call = ("0", BACKWARD, 70, 7)
    expected = Position(rank=1, records=ran([*PAST, backward], last=CollectiveProgress.enqueued), exited=True)
    found = proved(ran([*PAST, REDUCE]), expected)
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))


@pytest.mark.parametrize("operation", ["all_reduce", "barrier", "broadcast", "zeros"])
def test_a_rank_that_exited_inside_a_collective_had_enqueued_it(operation: str) -> None:
    """Only a backward's entry is a guess: any other open record counts, whatever its operation is called."""
    call: Call = ("0", operation, 70, 7)
    aborted = Position(rank=1, records=ran([*PAST, call], last=CollectiveProgress.enqueued), exited=True)
    assert judge(ran([*PAST, call]), aborted) is None


def test_with_known_members_one_that_exited_is_enough() -> None:
    """The other member is only late, and the one that exited will never come."""
    found = proved(ran([*PAST, GATHER]), after_exit(PAST), ran(PAST, last=CollectiveProgress.completed))
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1,))


def test_an_early_exit_is_one_by_some_ranks_and_not_by_all() -> None:
    """Of three ranks in a mismatch, two out of `train()` are to blame; all three are not."""
    away = Position(rank=0, records=ran([*PAST, LATER]), outside_training=True)
    stays = Position(rank=0, records=ran([*PAST, GATHER]))
    found = proved(stays, away, away)
    assert (found.cause, found.culprits) == (Cause.rank_exited_early, (1, 2))
    none_left = proved(stays, replace(away, outside_training=False))
    assert none_left.cause is Cause.collective_mismatch
    all_left = proved(replace(stays, outside_training=True), away, away)
    assert all_left.cause is Cause.collective_mismatch
