"""Micro-batches are split as little as possible, on all ranks alike, and only where they would not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.rank.rollouts._forecast_fit import (
    MARGIN,
    ForecastNeed,
    Needed,
    agree,
    choices,
    decide,
    rows_of_pieces,
)

GRADIENTS = 30


def need(rows: int, limit: int, *, known: int = 0, base: int = 100, repeated: int = 0) -> ForecastNeed:
    """The need of a rank whose passes take 10 a row, and whose gradients take 30 between passes.

    Args:
        known: rows that were measured.
    """

    def needed(count: int, split: bool) -> Needed:
        return Needed(10 * count + (GRADIENTS if split else 0), count <= known)

    return decide(rows, needed=needed, base_bytes=base, limit_bytes=limit, repeated=repeated)


@given(st.integers(1, 300), st.integers(1, 400))
def test_pieces_have_all_rows_and_differ_by_one_at_most(rows: int, pieces: int) -> None:
    found = rows_of_pieces(rows, pieces)
    assert sum(found) == rows
    assert len(found) == min(rows, pieces)
    assert max(found) - 0 >= 1
    assert max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)


def test_rows_are_halved_until_single_ones() -> None:
    assert choices(1) == [1]
    assert choices(2) == [1, 2]
    assert choices(6) == [1, 2, 4, 6]
    assert choices(8) == [1, 2, 4, 8]


def test_what_fits_is_not_split() -> None:
    assert need(8, 180, known=8).pieces == 1
    assert need(8, 179, known=8).pieces == 2


def test_larger_passes_than_any_that_was_measured_have_a_margin() -> None:
    assert need(8, 180, known=4).pieces == 2
    assert need(8, 180 + int(80 * MARGIN), known=4).pieces == 1


def test_gradients_are_kept_between_pieces() -> None:
    """Without them, halves would seem to fit here."""
    assert need(8, 150, known=8) == ForecastNeed(4, 0, 180, 150, 150)


def test_single_rows_are_all_that_can_be_done() -> None:
    assert need(6, 50) == ForecastNeed(6, 0, 160, 140, 50)


def test_nothing_is_split_without_a_limit_or_a_measurement() -> None:
    assert need(8, 0).pieces == 1
    unknown = decide(8, needed=lambda count, split: None, base_bytes=100, limit_bytes=50, repeated=2)
    assert unknown == ForecastNeed(1, 2, 0, 0, 50)


def test_the_rank_that_needs_most_decides() -> None:
    needs = [
        ForecastNeed(1, 0, 90, 90, 100),
        ForecastNeed(4, 0, 300, 90, 100),
        ForecastNeed(2, 0, 150, 80, 100),
    ]
    agreed = agree(needs)
    assert (agreed.pieces, agreed.rank, agreed.need) == (4, 1, needs[1])


@pytest.mark.parametrize(("repeated", "pieces"), [((1, 1), 1), ((2, 2), 2), ((1, 0), 4), ((0, 0), 4)])
def test_a_rollout_is_split_again_as_it_was_if_all_ranks_know_it(
    repeated: tuple[int, int], pieces: int
) -> None:
    """Ranks that decided apart would wait for each other."""
    needs = [ForecastNeed(1, repeated[0], 90, 90, 100), ForecastNeed(4, repeated[1], 300, 90, 100)]
    assert agree(needs).pieces == pieces
