"""When a snapshot in memory is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.builders.trainers.callback_loop import FakeCadence, Loop, with_flags


def due_steps(session: Any, cadence: FakeCadence) -> list[int]:
    """Return the steps after which a snapshot is due, of seven."""
    loop = Loop(session, cadence=cadence)
    loop.begin()
    due = []
    for _ in range(7):
        loop.step()
        if cadence.due:
            due.append(loop.state.global_step)
    return due


@pytest.mark.parametrize(
    ("is_main", "fixed", "wanted", "due", "asked"),
    [
        (True, (), (), [], range(1, 8)),
        (False, (2, 4), (), [2, 4], []),
        (True, (), (3,), [4], range(1, 8)),
        (False, (), (1, 2, 3), [], []),
    ],
    ids=["never", "fixed", "requested", "not by this rank"],
)
def test_a_snapshot_is_due_at_a_fixed_step_or_a_step_after_its_request(
    session: Any, is_main: bool, fixed: Any, wanted: Any, due: list[int], asked: Sequence[int]
) -> None:
    """Every rank computes the fixed steps, without a vote. Only rank 0 requests a snapshot, once for each;
    the vote tells all ranks.
    """
    session.is_main = is_main
    cadence = FakeCadence(fixed=fixed, wanted=wanted)
    assert due_steps(session, cadence) == due
    assert cadence.asked == list(asked)


def test_a_snapshot_requested_by_another_rank_is_due(session: Any) -> None:
    """The request arrives through the vote."""
    start = session.votes.start
    session.is_main = False
    session.votes.start = lambda vote: start(with_flags(vote, snapshot=vote.step == 2))
    assert due_steps(session, FakeCadence()) == [3]
