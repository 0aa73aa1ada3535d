"""The newest checkpoint is known, on disk or in memory, and only a later one is progress."""

from __future__ import annotations

import pytest
from support.builders.runtime.journal_records import (
    attempt,
    ended,
    incident,
    published,
    replay,
    started,
    train,
)


def test_a_new_highest_checkpoint_refills_the_budget() -> None:
    """Failures before it no longer count."""
    records = [started(0), incident(1, 3), incident(2, 3)]
    assert replay(*records).failures_without_progress == 2
    assert replay(*records, published(3, 5)).failures_without_progress == 0


@pytest.mark.parametrize("again", [5, 3])
def test_saving_an_old_step_again_is_not_progress(again: int) -> None:
    """Repeated work does not refill the budget."""
    history = replay(started(0), published(1, 5), incident(2, 6), published(3, again), incident(4, 6))
    assert history.failures_without_progress == 2
    assert history.highest_checkpoint == (1, 5)


def test_a_checkpoint_of_a_later_call_is_progress() -> None:
    """Call 2 at step 1 is further than call 1 at step 20."""
    history = replay(started(0), published(1, 20, call=1), incident(2, 0), published(3, 1, call=2))
    assert history.failures_without_progress == 0
    assert history.highest_checkpoint == (2, 1)


def test_the_last_published_checkpoint_is_kept() -> None:
    """Its step and path."""
    history = replay(started(0), published(1, 5), published(2, 10))
    assert history.checkpoint is not None
    assert (history.checkpoint.step, history.checkpoint.path) == (10, "out/checkpoint-10")


def test_an_older_checkpoint_written_later_does_not_hide_the_newest() -> None:
    """A run that stops writes its newest snapshot first, then the scheduled checkpoint before it."""
    history = replay(started(0), attempt(1), train(2), published(3, 9), published(4, 8))
    assert history.checkpoint is not None
    assert history.checkpoint.step == 9


def test_an_attempt_that_began_before_the_newest_checkpoint_replaces_it() -> None:
    """Checkpoint 9 was damaged or set aside: once the attempt that began at 4 saves, its checkpoint is the
    newest.
    """
    events = [started(0), attempt(1), train(2), published(3, 9), attempt(4), train(5, step=4)]
    kept = replay(*events).checkpoint
    assert kept is not None
    assert kept.step == 9
    replaced = replay(*events, published(6, 6)).checkpoint
    assert replaced is not None
    assert replaced.step == 6
    later = replay(*events, published(6, 6), published(7, 5)).checkpoint
    assert later is not None
    assert later.step == 6


@pytest.mark.parametrize("code", [0, 75, 93])
def test_a_run_that_has_ended_has_no_snapshot_in_memory(code: int) -> None:
    """Every snapshot needed is on disk by then or cannot be read, and the memory is freed."""
    staged = (1, "checkpoint_staged", {"step": 40, "train_call": 1})
    assert replay(started(0), staged).snapshot_step == 40
    failed = (2, "checkpoint_failed", {"step": 40, "reason": "cannot be read"})
    for last in (published(2, 40), failed):
        assert replay(started(0), staged, last, ended(3, code)).snapshot_step is None


def test_a_snapshot_that_a_full_disk_kept_in_memory_is_shown_until_it_is_written() -> None:
    """It outlives the run; the next launch of the same command writes it."""
    kept = [
        started(0), (1, "checkpoint_staged", {"step": 40, "train_call": 1}),
        (2, "checkpoint_failed", {"step": 40, "reason": "the disk is full"}),
        (3.0, "run_ended", {"exit_code": 0, "snapshots_kept": True}),
    ]  # fmt: skip
    assert replay(*kept).snapshot_step == 40
    assert replay(*kept, published(4, 40)).snapshot_step is None


def test_a_snapshot_survives_a_killed_supervisor() -> None:
    """It wrote no end: the memory is not freed."""
    staged = (1, "checkpoint_staged", {"step": 40, "train_call": 1})
    assert replay(started(0), staged, started(5)).snapshot_step == 40
