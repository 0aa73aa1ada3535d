"""How often to take a snapshot: the formula, its bounds, and what it is fed with."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.record.failure_rate import (
    MOST_STEPS,
    PRIOR_FAILURE_SECONDS,
    mean_time_between_failures,
    steps_between_snapshots,
)

SECONDS = st.floats(0.0, 1e7)


def test_youngs_example() -> None:
    """A copy of 2 s and a failure every 10,000 s: 200 s between copies, in steps of 10 s."""
    assert steps_between_snapshots(2.0, 10_000.0, 10.0) == 20


@given(cost=st.floats(1e-3, 1e3), failure=st.floats(60.0, 1e6), step=st.floats(0.1, 1e3))
def test_the_optimum_wastes_least(cost: float, failure: float, step: float) -> None:
    """Neither half nor twice as often would waste less, by Young's first-order sum of copies and lost work."""
    steps = steps_between_snapshots(cost, failure, step)

    def waste(between: float) -> float:
        return cost / between + between / (2 * failure)

    if steps > 1:  # else the step itself is longer than the optimum
        assert waste(steps * step) <= waste(2 * steps * step) * (1 + 1e-9)
        assert waste(steps * step) <= waste(steps * step / 2) * (1 + 1e-9)


@given(cost=SECONDS, failure=SECONDS, step=SECONDS)
def test_never_less_than_a_step(cost: float, failure: float, step: float) -> None:
    """Whatever was measured."""
    assert 1 <= steps_between_snapshots(cost, failure, step) <= MOST_STEPS


def test_next_to_no_time_a_step_does_not_overflow() -> None:
    """A clock of coarse ticks, or one that was set."""
    assert steps_between_snapshots(1.0, 1e6, 1e-310) == MOST_STEPS


@pytest.mark.parametrize(
    ("cost", "failure", "step"),
    [
        (0.0, 100.0, 1.0),
        (-1.0, 100.0, 1.0),
        (1.0, 0.0, 1.0),
        (1.0, -5.0, 1.0),
        (1.0, 100.0, 0.0),
        (1.0, 100.0, -1.0),
        (1.0, 100.0, math.nan),
        (math.nan, 100.0, 1.0),
    ],
)
def test_a_measurement_that_says_nothing_gives_every_step(cost: float, failure: float, step: float) -> None:
    """A clock that stood still or went back."""
    assert steps_between_snapshots(cost, failure, step) == 1


def test_a_run_that_has_shown_nothing_is_expected_to_fail_as_others_do() -> None:
    """One failure in four hours."""
    assert mean_time_between_failures(0.0, 0) == PRIOR_FAILURE_SECONDS == 4 * 3600


def test_what_a_run_shows_outweighs_what_was_expected() -> None:
    """Ten failures in an hour, or none in a month."""
    assert mean_time_between_failures(3600.0, 10) == pytest.approx((3600 + 14_400) / 11)
    assert mean_time_between_failures(30 * 86_400.0, 0) > 100 * PRIOR_FAILURE_SECONDS


@given(elapsed=SECONDS, failures=st.integers(0, 1000))
def test_each_failure_makes_the_next_one_likelier(elapsed: float, failures: int) -> None:
    """And each hour without one less so."""
    here = mean_time_between_failures(elapsed, failures)
    assert mean_time_between_failures(elapsed, failures + 1) < here
    assert mean_time_between_failures(elapsed + 3600.0, failures) > here
