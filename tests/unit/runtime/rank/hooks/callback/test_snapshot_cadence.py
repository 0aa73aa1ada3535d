"""When a snapshot in memory is due."""

from __future__ import annotations

from typing import Any

from support.builders.trainers.callback_loop import FakeCadence, Loop, with_flags

from grpo_run.runtime.rank.saving._cadence import Cadence


def due_steps(session: Any, cadence: Cadence, steps: int = 7) -> list[int]:
    """Return the steps after which a snapshot is due."""
    loop = Loop(session, cadence=cadence)
    loop.begin()
    due = []
    for _ in range(steps):
        loop.step()
        if cadence.due:
            due.append(loop.state.global_step)
    return due


def test_a_cadence_that_schedules_nothing_is_never_due(session: Any) -> None:
    """Direct saves use such a cadence."""
    assert due_steps(session, FakeCadence()) == []


def test_a_fixed_cadence_needs_no_vote(session: Any) -> None:
    """Every rank computes the same steps."""
    session.is_main = False
    assert due_steps(session, FakeCadence(fixed=(2, 4))) == [2, 4]


def test_a_requested_snapshot_is_due_one_step_later(session: Any) -> None:
    """Once the vote has told all ranks; one snapshot per request."""
    cadence = FakeCadence(wanted=(3,))
    assert due_steps(session, cadence) == [4]
    assert cadence.asked == [1, 2, 3, 4, 5, 6, 7]


def test_only_rank_0_requests_snapshots(session: Any) -> None:
    """The other ranks follow the vote."""
    cadence = FakeCadence(wanted=(1, 2, 3))
    session.is_main = False
    assert due_steps(session, cadence) == []
    assert cadence.asked == []


def test_a_snapshot_requested_by_another_rank_is_due(session: Any) -> None:
    """The request arrives through the vote."""
    start = session.votes.start
    session.is_main = False
    session.votes.start = lambda vote: start(with_flags(vote, snapshot=vote.step == 2))
    assert due_steps(session, FakeCadence()) == [3]


def test_one_request_makes_one_snapshot(session: Any) -> None:
    """With the real cadence, whose request takes effect a step later."""
    now = [0.0]
    intervals: list[int] = []
    cadence = Cadence(
        None,
        failure_seconds=2000.0,
        notify=lambda steps, cost, step: intervals.append(steps),
        clock=lambda: now[0],
    )
    loop = Loop(session, cadence=cadence)
    loop.state.max_steps = 100
    loop.begin()
    taken = []
    for _ in range(60):
        now[0] += 10.0
        loop.step()
        if cadence.due:
            now[0] += 10.0
            taken.append(loop.state.global_step)
            cadence.taken(loop.state.global_step, 10.0)
    # sqrt(2 * 10 * 2000) is 200 s, 20 steps; each snapshot is due a step after it was requested
    assert intervals == [20]
    assert taken == [2, 4, 25, 46]
