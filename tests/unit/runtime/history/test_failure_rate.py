"""The mean time between failures combines the run's history with a prior."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.history.progress import PRIOR_FAILURE_SECONDS, mean_time_between_failures

SECONDS = st.floats(0.0, 1e7)


def test_a_new_run_has_the_prior() -> None:
    """The prior is one failure in four hours."""
    assert mean_time_between_failures(0.0, 0) == PRIOR_FAILURE_SECONDS == 4 * 3600


def test_the_history_of_a_run_outweighs_the_prior() -> None:
    """Holds for ten failures in an hour, and for none in a month."""
    assert mean_time_between_failures(3600.0, 10) == pytest.approx((3600 + 14_400) / 11)
    assert mean_time_between_failures(30 * 86_400.0, 0) > 100 * PRIOR_FAILURE_SECONDS


@given(elapsed=SECONDS, failures=st.integers(0, 1000))
def test_each_failure_shortens_the_mean_time(elapsed: float, failures: int) -> None:
    """Each hour without a failure lengthens it."""
    here = mean_time_between_failures(elapsed, failures)
    assert mean_time_between_failures(elapsed, failures + 1) < here
    assert mean_time_between_failures(elapsed + 3600.0, failures) > here
