"""Two ranks that called different collectives in one place are a mismatch, if both will wait for ever."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from support.builders.watchdog.collective_positions import (
    GATHER,
    LATER,
    PAIR,
    PAST,
    REDUCE,
    Call,
    at_line,
    judge,
    proved,
    ran,
)

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads


def test_different_operations_at_one_place_are_a_mismatch() -> None:
    """Between two ranks, the earlier steps tell which is at fault."""
    found = proved(ran([*PAST, GATHER, LATER]), ran([*PAST, GATHER, GATHER]), ran([*PAST, GATHER, LATER]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), (0, 2))
    assert found.mismatch == (
        "all_gather of 3 float32 elements against all_reduce of 7 float32 elements at #8 of group 0"
    )
    assert found.sentence == (
        "Deadlock: rank 1 is in all_gather (train.py:88, #8) while ranks 0 and 2 are in all_reduce"
        " (train.py:95, #8)."
    )
    assert found.locations == {0: at_line(95), 1: at_line(88), 2: at_line(95)}


def test_a_mismatch_with_an_exited_rank_is_decided_by_the_records() -> None:
    """Gloo may abort the rank that is right, so the order of exits says nothing."""
    aborted = Position(rank=0, records=ran([*PAST, GATHER]), exited=True)
    found = proved(aborted, ran([*PAST, LATER]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), ())
    wrong = Position(rank=0, records=ran([*PAST, LATER]), exited=True)
    found = proved(wrong, ran([*PAST, GATHER]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (0,), (1,))
    found = proved(Position(rank=0, records=ran([REDUCE]), exited=True), ran([GATHER]))
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, ())


def test_a_mismatch_with_one_rank_that_outside_training_is_an_early_exit() -> None:
    """It is outside `train()`, and its next collective coincides with the gather of the other ranks."""
    away = without_other_threads(Position(rank=0, records=ran([*PAST, LATER]), outside_training=True))
    stays = ran([*PAST, GATHER])
    found = proved(stays, away)
    assert (found.cause, found.culprits, found.waiters) == (Cause.rank_exited_early, (1,), (0,))
    assert found.mismatch == (
        "all_reduce of 7 float32 elements against all_gather of 3 float32 elements at #7 of group 0"
    )
    both = proved(Position(rank=0, records=stays, outside_training=True), away)
    assert both.cause is Cause.collective_mismatch


def test_two_ranks_without_earlier_steps_cannot_be_told_apart() -> None:
    """Their first collectives differ."""
    found = proved(ran([REDUCE]), ran([GATHER]))
    assert (found.culprits, found.waiters) == ((), (0, 1))
    assert found.sentence == (
        "Deadlock: rank 0 is in all_reduce (train.py:91, #1) while rank 1 is in all_gather"
        " (train.py:88, #1)"
        "; the records do not tell which is at fault."
    )


@pytest.mark.parametrize("change", [{"sizes": ((9,),)}, {"dtypes": ("Half",)}])
def test_different_inputs_are_a_mismatch(change: dict[str, Any]) -> None:
    """The same operation with another number of elements, or another dtype."""
    found = proved(ran([*PAST, GATHER]), ran([*PAST, GATHER], **change))
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    assert "all_gather of 3 float32 elements (train.py:88, #7)" in found.sentence


def test_inputs_that_may_differ_are_no_mismatch() -> None:
    """A gather accepts a different size from each rank."""
    call: Call = ("0", "gather", 70, 3)
    assert judge(ran([call]), ran([call], sizes=((9,),))) is None


def test_completed_operations_are_no_mismatch() -> None:
    """Operations that completed are no deadlock, whatever their names are."""
    assert (
        judge(
            ran([GATHER], last=CollectiveProgress.completed), ran([REDUCE], last=CollectiveProgress.completed)
        )
        is None
    )


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_logged_backward_against_a_gather_is_a_mismatch_if_a_rank_is_gone(aborted: int) -> None:
    """One rank was aborted where DDP would have all-reduced and the other rank gathers."""
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=CollectiveProgress.enqueued, sizes=(), dtypes=())
    records = [ran([*PAST, GATHER]), backward]
    positions = [Position(rank=r, records=records[r], exited=r == aborted) for r in (0, 1)]
    found = judge(*positions)
    assert found is not None
    assert (found.cause, found.culprits) == (Cause.collective_mismatch, (1,))
    positions[0] = replace(positions[0], records=ran([*PAST, LATER]))
    found = judge(*positions)
    assert found is None or found.cause is not Cause.collective_mismatch


def test_a_logged_backward_of_running_ranks_proves_no_mismatch() -> None:
    """The position of its all-reduces is an estimate: with `no_sync` or unused layers there may be none."""
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=CollectiveProgress.enqueued, sizes=(), dtypes=())
    assert judge(ran([*PAST, GATHER]), backward) is None
    third = Position(rank=2, records=None, exited=True)
    assert judge(ran([*PAST, GATHER]), backward, third) is None


@pytest.mark.parametrize("hasty", [0, 1])
def test_a_collective_with_a_short_timeout_is_no_mismatch(hasty: int) -> None:
    """It fails by itself, and the script expects that, whichever of the two operations it is."""
    calls = [[*PAST, GATHER], [*PAST, LATER]]
    timeouts = [math.inf, math.inf]
    timeouts[hasty] = 59.9
    records = [ran(c, timeout_seconds=t) for c, t in zip(calls, timeouts, strict=True)]
    assert judge(*records) is None
    patient = [ran(c, timeout_seconds=60.0) for c in calls]
    assert judge(*patient) is not None


def test_a_skipped_collective_ends_as_a_mismatch() -> None:
    """The rank is one collective ahead in the same group."""
    found = proved(ran([*PAST, GATHER]), ran([*PAST, REDUCE]))
    assert (found.cause, found.culprits, found.waiters) == (Cause.collective_mismatch, (1,), (0,))


def test_halves_of_a_split_with_one_name_are_not_compared() -> None:
    """torch may give both halves one name; their operations need not match."""
    one = ran([("half", "all_gather", 1, 1)], members=(0, 1))
    other = ran([("half", "all_reduce", 2, 1)], members=(2, 3))
    assert judge(one, (), other, ()) is None


def test_sends_are_not_compared() -> None:
    """Point-to-point numbers are not the group's."""
    send = ran([("0", "send", 1, 1)], point_to_point=True)
    receive = ran([("0", "recv", 2, 1)], point_to_point=True)
    assert judge(send, receive) is None


def test_a_tie_of_four_names_no_rank() -> None:
    """All four ranks wait, without earlier steps."""
    found = proved(ran([REDUCE]), ran([GATHER]), ran([GATHER]), ran([REDUCE]))
    assert (found.culprits, found.waiters) == ((), (0, 1, 2, 3))
    assert "ranks 0 and 3 are in all_reduce" in found.sentence


def test_a_mismatch_that_nobody_waits_for_is_no_proof() -> None:
    """A program that never waits for the handle finishes."""
    ours, theirs = (ran([*PAST, call], last=CollectiveProgress.enqueued) for call in (GATHER, LATER))
    assert judge(ours, theirs) is None
    assert judge(ran([*PAST, GATHER], last=CollectiveProgress.completed), theirs) is None
    assert judge(ours, ran([*PAST, LATER])) is not None
    on_device = [tuple(replace(record, on_device=True) for record in records) for records in (ours, theirs)]
    assert judge(*on_device) is not None


@pytest.mark.parametrize("completed", [0, 1])
def test_a_mismatch_with_one_side_completed_is_a_mismatch(completed: int) -> None:
    """The side that completed was given a wrong answer; the other waits for ever."""
    last = [CollectiveProgress.waiting, CollectiveProgress.waiting]
    last[completed] = CollectiveProgress.completed
    found = proved(ran([*PAST, GATHER], last=last[0]), ran([*PAST, LATER], last=last[1]))
    assert found.cause is Cause.collective_mismatch


def test_a_pair_that_can_meet_does_not_end_the_search() -> None:
    """Ranks 0 and 1 agree; rank 2 is the one that differs."""
    assert proved(ran([*PAST, GATHER]), ran([*PAST, GATHER]), ran([*PAST, LATER])).culprits == (2,)


@pytest.mark.parametrize("first", ["completed", "hasty", "nobody waits", "backward"])
def test_a_pair_that_proves_nothing_does_not_end_the_search(first: str) -> None:
    """Ranks 0 and 1 are compared first; rank 2 contradicts one of them."""
    enqueued, done = CollectiveProgress.enqueued, CollectiveProgress.completed
    backward = ran([*PAST, ("0", "backward", 91, 0)], last=enqueued, sizes=(), dtypes=())
    here = {
        "completed": (ran([*PAST, GATHER], last=done), ran([*PAST, GATHER], last=done)),
        "hasty": (ran([*PAST, GATHER]), ran([*PAST, LATER], timeout_seconds=5.0)),
        "nobody waits": (ran([*PAST, GATHER], last=enqueued), ran([*PAST, LATER], last=enqueued)),
        "backward": (backward, ran([*PAST, GATHER])),
    }[first]
    assert judge(*here) is None
    assert proved(*here, ran([*PAST, LATER])).cause is Cause.collective_mismatch


def test_a_mismatch_is_proved_in_a_group_whose_members_are_unknown() -> None:
    """Both ranks are in it, so each needs the other."""
    found = proved(ran([*PAST, PAIR]), ran([*PAST, ("pair", "all_gather", 51, 2)]))
    assert found.cause is Cause.collective_mismatch


def test_sends_do_not_make_a_group_ambiguous() -> None:
    """A group with sends and receives still proves what its collectives show."""
    send = ran([("0", "send", 1, 1)], point_to_point=True, last=CollectiveProgress.completed)
    found = proved((*send, *ran([*PAST, GATHER])), (*send, *ran([*PAST, LATER])))
    assert found.cause is Cause.collective_mismatch
