"""Step times: the productive time of a run, and the present duration of a step."""

from __future__ import annotations

import pytest

from grpo_run.runtime.history.progress import MIN_COMMITS, RECENT_COMMITS, StepTimes


def times_of(*seconds: float, call: int = 1) -> StepTimes:
    """Steps of these durations in one train() call that began at 100 s."""
    times, now = StepTimes(), 100.0
    times.begin(call, 0, now)
    for step, duration in enumerate(seconds, 1):
        now += duration
        times.commit(call, step, now)
    return times


def test_the_step_time_is_unknown_until_a_few_steps_are_committed() -> None:
    """The first one includes compilation."""
    assert MIN_COMMITS == 3
    assert times_of(30.0, 2.0).typical_seconds(1) is None
    assert times_of(30.0, 2.0, 2.0).typical_seconds(1) == pytest.approx(2.0)


def test_an_outlier_does_not_change_the_step_time() -> None:
    """An evaluation between two steps, for example."""
    assert times_of(*[2.0] * 10, 500.0, *[2.0] * 3).typical_seconds(1) == pytest.approx(2.0)


def test_the_step_time_follows_the_run() -> None:
    """Only the last steps count."""
    assert times_of(*[2.0] * 100, *[5.0] * RECENT_COMMITS).typical_seconds(1) == pytest.approx(5.0)


def test_a_commit_of_several_steps_counts_as_several() -> None:
    """Fast steps are observed several at once."""
    times = StepTimes()
    times.begin(1, 0, 0.0)
    for number in range(1, 6):
        times.commit(1, 4 * number, 1.0 * number)
    assert times.typical_seconds(1) == pytest.approx(0.25)


def test_another_train_call_has_a_step_time_of_its_own() -> None:
    """Steps of supervised fine-tuning do not tell how long GRPO's take."""
    times = times_of(*[2.0] * 10)
    times.begin(2, 0, 200.0)
    times.commit(2, 1, 230.0)
    assert times.typical_seconds(2) is None
    assert times.typical_seconds(1) == pytest.approx(2.0)


def test_steps_that_are_repeated_count_once() -> None:
    """Those after the step that training resumed from are done again; the restart itself is no step."""
    times = times_of(*[2.0] * 10)
    times.interrupt()
    times.commit(1, 11, 400.0)
    times.interrupt()
    times.begin(1, 8, 1000.0)
    times.commit(1, 9, 1003.0)
    assert times.productive_seconds() == pytest.approx(19.0)


def test_what_was_gained_since_a_position_is_its_steps_at_their_median_duration() -> None:
    """A first step with compilation does not count for more; steps that were lost do not count."""
    times = times_of(2.0, 2.0, 40.0, 2.0, 2.0)
    assert times.gained_seconds(1, 2) == pytest.approx(6.0)
    assert times.gained_seconds(1, 5) == 0.0
    times.begin(1, 3, 200.0)
    assert times.gained_seconds(1, 1) == pytest.approx(2 * 21.0)
    times.begin(2, 0, 300.0)
    times.commit(2, 4, 304.0)
    assert times.gained_seconds(1, 3) == pytest.approx(4.0)
