"""Predictions follow what was measured, and never lie below it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.memory import files
from grpo_run.runtime.rank.rollouts._forecast_fit import MOST_SIZES, PeakFit

SIZES = st.tuples(st.integers(1, 64), st.integers(1, 8192))


def fitted(measured: dict[tuple[int, int], int]) -> PeakFit:
    """A fit of these peaks."""
    fit = PeakFit()
    for size, peak in measured.items():
        fit.add(size, peak)
    return fit


def test_nothing_is_predicted_before_something_was_measured() -> None:
    assert PeakFit().predict((4, 100)) is None
    assert PeakFit().most_tokens == 0


def test_peaks_that_grow_with_tokens_are_extrapolated() -> None:
    fit = fitted({(4, length): 5_000 + 70 * 4 * length for length in (100, 130, 170)})
    assert fit.predict((4, 400)) == pytest.approx(5_000 + 70 * 1600, rel=1e-4)
    assert fit.predict((2, 400)) == pytest.approx(5_000 + 70 * 800, rel=1e-4)


def test_peaks_that_grow_with_the_square_of_the_length_are_extrapolated() -> None:
    """Eager attention stores its matrices."""
    fit = fitted({(4, length): 70 * 4 * length + 3 * 4 * length**2 for length in (100, 150, 200, 300)})
    assert fit.predict((4, 900)) == pytest.approx(70 * 3600 + 3 * 4 * 900**2, rel=1e-3)


def test_one_size_says_that_memory_is_proportional() -> None:
    """So do sizes that are so close that their slope is noise."""
    assert fitted({(4, 100): 8000}).predict((4, 200)) == 16000
    assert fitted({(4, 100): 8000, (4, 101): 7000}).predict((4, 200)) == 16000


@given(st.dictionaries(SIZES, st.integers(0, 2**40), min_size=1, max_size=12))
def test_no_prediction_is_below_what_was_measured(measured: dict[tuple[int, int], int]) -> None:
    fit = fitted(measured)
    for size, peak in measured.items():
        predicted = fit.predict(size)
        assert predicted is not None
        assert predicted >= peak - 1 - peak * 1e-9


@given(st.dictionaries(SIZES, st.integers(0, 2**40), min_size=1, max_size=12), SIZES)
def test_longer_rows_never_need_less(measured: dict[tuple[int, int], int], size: tuple[int, int]) -> None:
    fit = fitted(measured)
    rows, length = size
    shorter, longer = fit.predict(size), fit.predict((rows, length + 1))
    assert shorter is not None
    assert longer is not None
    assert longer >= shorter >= 0


def test_what_an_earlier_attempt_has_measured_counts_until_there_is_enough() -> None:
    fit = PeakFit({(4, 100): 9000, (4, 200): 18000})
    fit.add((4, 120), 7000)
    assert fit.most_tokens == 800
    fit.add((4, 150), 8750)
    assert dict(fit.measured) == {(4, 120): 7000, (4, 150): 8750}


def test_few_sizes_are_kept_and_the_largest_stay() -> None:
    fit = fitted({(1, length): length for length in range(1, 3 * MOST_SIZES)})
    assert len(fit.measured) == MOST_SIZES == files.MOST_SIZES
    assert fit.most_tokens == 3 * MOST_SIZES - 1
