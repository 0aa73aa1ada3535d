"""Goodput counts the time of steps that were kept, and nothing else."""

from __future__ import annotations

from support.builders.runtime.journal_records import (
    attempt,
    commit,
    ended,
    incident,
    replay,
    restored,
    started,
    train,
)


def test_goodput_excludes_repeated_steps() -> None:
    """Computed by hand: 40 s of wall time; steps 1 to 4 take 4 s each, 3 and 4 are lost and repeated.

    Productive: 1 and 2 of the first attempt (8 s), 3 to 5 of the second one (12 s): 20 of 40 s.
    """
    history = replay(
        started(0), attempt(1), train(2), commit(6, 1), commit(10, 2), commit(14, 3), commit(18, 4),
        incident(20, 4), attempt(22, 1), train(26, 2), commit(30, 3), commit(34, 4), commit(38, 5),
        ended(40, 0),
    )  # fmt: skip
    assert history.productive_seconds() == 20.0
    assert history.goodput() == 0.5


def test_steps_committed_between_two_polls_count_fully() -> None:
    """The supervisor polls ten times a second; fast steps are observed several at once."""
    history = replay(started(0), attempt(0), train(0), commit(5, 3), commit(10, 8), ended(10, 0))
    assert history.goodput() == 1.0


def test_the_time_left_follows_from_the_present_pace() -> None:
    """Computed by hand: 90 more steps of 2 s."""
    history = replay(started(0), attempt(0), train(0), *[commit(2 * step, step) for step in range(1, 11)])
    assert history.step_seconds() == 2.0
    assert history.remaining_seconds() == 180.0
    history.step = 120
    assert history.remaining_seconds() == 0.0
    history.target_steps = 0
    assert history.remaining_seconds() is None


def test_restoring_the_first_call_keeps_the_goodput_of_the_second() -> None:
    """Steps 1 to 3 of call 2 are in the checkpoint that the run resumes from: they are productive."""
    history = replay(
        started(0), attempt(0), train(0, 0, call=1), commit(10, 20, call=1),
        train(10, 0, call=2), commit(20, 3, call=2), incident(20, 3),
        attempt(20, 1), restored(20, 20, call=1), train(20, 3, call=2), commit(40, 10, call=2), ended(40, 0),
    )  # fmt: skip
    assert history.productive_seconds() == 40.0


def test_goodput_excludes_the_time_between_supervisors() -> None:
    """A run stopped overnight does not perform worse."""
    history = replay(
        started(0), attempt(0), train(0), commit(10, 1), ended(10, 75),
        started(1000), attempt(1000, 1), train(1000, 1), commit(1010, 2), ended(1010, 0),
    )  # fmt: skip
    assert history.goodput() == 1.0


def test_goodput_excludes_the_time_after_a_killed_supervisor() -> None:
    """It wrote no end; its absence starts at its last event."""
    history = replay(
        started(0), attempt(0), train(0), commit(10, 1),
        started(1000), attempt(1000, 1), train(1000, 1), commit(1010, 2), ended(1010, 0),
    )  # fmt: skip
    assert history.goodput() == 1.0


def test_goodput_of_a_live_run_counts_until_now() -> None:
    """It decreases while a run hangs and writes no events."""
    history = replay(started(0), attempt(0), train(0), commit(10, 1))
    assert history.goodput(now=40) == 0.25
    assert history.goodput() == 1.0
