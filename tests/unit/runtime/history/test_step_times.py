"""How a run gets on: its productive time, the present duration of a step, and how often it fails."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.history.progress import (
    MIN_COMMITS,
    MOST_COMMITS,
    PRIOR_FAILURE_SECONDS,
    RECENT_COMMITS,
    StepTimes,
    mean_time_between_failures,
)


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
    assert times.gained_seconds(0, 0) == pytest.approx(9 * 2.0)
    assert (sum(times.durations.counts), times.durations.sum_seconds) == (11, pytest.approx(23.0))


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


def test_a_new_run_has_the_prior() -> None:
    """The prior is one failure in four hours."""
    assert mean_time_between_failures(0.0, 0) == PRIOR_FAILURE_SECONDS == 4 * 3600


def test_the_history_of_a_run_outweighs_the_prior() -> None:
    """Holds for ten failures in an hour, and for none in a month."""
    assert mean_time_between_failures(3600.0, 10) == pytest.approx((3600 + 14_400) / 11)
    assert mean_time_between_failures(30 * 86_400.0, 0) > 100 * PRIOR_FAILURE_SECONDS


@given(elapsed=st.floats(0.0, 1e7), failures=st.integers(0, 1000))
def test_each_failure_shortens_the_mean_time(elapsed: float, failures: int) -> None:
    """Each hour without a failure lengthens it."""
    here = mean_time_between_failures(elapsed, failures)
    assert mean_time_between_failures(elapsed, failures + 1) < here
    assert mean_time_between_failures(elapsed + 3600.0, failures) > here


def test_the_commits_of_long_runs_are_joined() -> None:
    """Memory stays bounded; what was gained since a checkpoint is still known."""
    times = StepTimes()
    times.begin(1, 0, 0.0)
    for step in range(1, 10_001):
        times.commit(1, step, 2.0 * step)
    assert len(times._commits) <= MOST_COMMITS
    assert times.gained_seconds(1, 0) == pytest.approx(20_000.0)
    assert times.gained_seconds(1, 9_900) == pytest.approx(200.0)
    assert times.gained_seconds(1, 2_000) == pytest.approx(16_000.0)
    assert times.typical_seconds(1) == pytest.approx(2.0)
