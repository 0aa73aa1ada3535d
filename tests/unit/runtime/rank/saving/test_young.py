"""Young's formula: the optimal interval, its bounds, and invalid measurements."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.rank.saving._cadence import MAX_STEPS, steps_between_snapshots

SECONDS = st.floats(0.0, 1e7)


def test_an_example() -> None:
    """2 s per snapshot and a failure every 10,000 s give 200 s between snapshots: 20 steps of 10 s."""
    assert steps_between_snapshots(2.0, 10_000.0, 10.0) == 20


@given(cost=st.floats(1e-3, 1e3), failure=st.floats(60.0, 1e6), step=st.floats(0.1, 1e3))
def test_the_optimum_loses_the_least_time(cost: float, failure: float, step: float) -> None:
    """Half and twice the interval lose more, by Young's first-order sum of copies and lost work."""
    steps = steps_between_snapshots(cost, failure, step)

    def lost(between: float) -> float:
        return cost / between + between / (2 * failure)

    if steps > 1:  # else a step is longer than the optimum
        assert lost(steps * step) <= lost(2 * steps * step) * (1 + 1e-9)
        assert lost(steps * step) <= lost(steps * step / 2) * (1 + 1e-9)


@given(cost=SECONDS, failure=SECONDS, step=SECONDS)
def test_the_interval_is_at_least_one_step(cost: float, failure: float, step: float) -> None:
    """Holds for any measurement, up to the maximum."""
    assert 1 <= steps_between_snapshots(cost, failure, step) <= MAX_STEPS


def test_a_tiny_step_time_does_not_overflow() -> None:
    """Clocks can be coarse, or be set."""
    assert steps_between_snapshots(1.0, 1e6, 1e-310) == MAX_STEPS


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
def test_an_invalid_measurement_gives_every_step(cost: float, failure: float, step: float) -> None:
    """The clock stood still or went back."""
    assert steps_between_snapshots(cost, failure, step) == 1
