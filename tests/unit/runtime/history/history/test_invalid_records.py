"""An invalid record is counted and ignored."""

from __future__ import annotations

from typing import Any

import pytest
from support.builders.runtime.journal_records import attempt, commit, replay, started, train

from grpo_run.runtime.history.history import History


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("train_started", {}),
        ("train_started", {"rank": 0, "step": "x", "train_call": 1, "target_steps": 100}),
        ("step_committed", {"step": None, "train_call": 1, "committed_at": 2.0}),
        ("step_committed", {"truncated_bytes": 70_000}),
        ("checkpoint_published", {"step": 5}),
    ],
)
def test_an_invalid_record_is_counted_and_ignored(event: str, fields: dict[str, Any]) -> None:
    """It was truncated, or another version wrote it; the records around it count."""
    around = [started(0), attempt(1), train(2), commit(3, 1)]
    history = replay(*around, (4, event, fields), commit(5, 2))
    assert history.unreadable == 1
    assert history.best_position == replay(*around, commit(5, 2)).best_position == (1, 2)


@pytest.mark.parametrize("time", ["noon", [1], {"a": 1}])
def test_a_record_with_an_invalid_time_is_counted_and_ignored(time: Any) -> None:
    """The clock of the history does not change."""
    history = History.of(
        [{"time": 1.0, "event": "warning"}, {"time": time, "event": "run_started", "run": "x"}]
    )
    assert (history.unreadable, history.time.last, history.run_id) == (1, 1.0, History().run_id)


def test_events_without_a_meaning_here_are_not_invalid() -> None:
    """The count of invalid records of a complete journal is 0."""
    assert replay(started(0), attempt(1), train(2), (3, "warning", {}), commit(4, 1)).unreadable == 0
