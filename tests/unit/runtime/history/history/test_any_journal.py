"""What holds for any sequence of events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.builders.runtime.journal_records import (
    attempt,
    commit,
    ended,
    incident,
    published,
    replay,
    started,
    train,
)

from grpo_run.runtime.history.history import History

STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(1, 30), st.integers(1, 2)),
        st.tuples(st.just("train"), st.integers(0, 30), st.integers(1, 2)),
        st.tuples(st.just("incident"), st.integers(0, 30), st.just(1)),
        st.tuples(st.just("published"), st.integers(0, 30), st.integers(1, 2)),
        st.tuples(st.just("attempt"), st.integers(0, 5), st.just(1)),
        st.tuples(st.just("started"), st.just(0), st.just(1)),
        st.tuples(st.just("ended"), st.sampled_from([0, 75, 93]), st.just(1)),
    ),
    max_size=40,
)


def records_of(
    story: list[tuple[str, int, int]], times: list[float]
) -> list[tuple[float, str, dict[str, Any]]]:
    """Return the records of a story."""
    makers = {
        "commit": commit,
        "train": train,
        "published": published,
        "incident": lambda time, step, call: incident(time, step),
        "attempt": lambda time, number, call: attempt(time, number),
        "started": lambda time, zero, call: started(time),
        "ended": lambda time, code, call: ended(time, code),
    }
    return [makers[kind](time, number, call) for time, (kind, number, call) in zip(times, story, strict=True)]


@given(story=STORIES, data=st.data())
def test_ratios_and_counts_stay_in_range(story: list[tuple[str, int, int]], data: st.DataObject) -> None:
    """For any sequence of events, and a wall clock that may go backwards."""
    times = data.draw(st.lists(st.floats(0, 1e6), min_size=len(story), max_size=len(story)))
    history = replay(*records_of(story, times))
    goodput = history.goodput()
    assert goodput is None or 0.0 <= goodput <= 1.0
    for recovery in history.recoveries:
        assert recovery.lost_steps is None or recovery.lost_steps >= 0
        assert recovery.recovery_seconds is None or recovery.recovery_seconds >= 0.0
    assert history.failures_without_progress <= len(history.recoveries)


@given(story=STORIES, data=st.data())
def test_highest_checkpoint_and_best_position_never_decrease(
    story: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """After each record. Applying records one by one equals replaying all."""
    times = sorted(data.draw(st.lists(st.floats(0, 1e6), min_size=len(story), max_size=len(story))))
    history = History()
    before = (history.highest_checkpoint, history.best_position)
    for time, event, fields in records_of(story, times):
        history.apply({"time": time, "event": event, **fields})
        after = (history.highest_checkpoint, history.best_position)
        assert after[0] >= before[0]
        assert after[1] >= before[1]
        before = after
    assert history == replay(*records_of(story, times))
