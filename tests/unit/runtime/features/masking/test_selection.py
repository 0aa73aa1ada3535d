"""Which samples leave, from the gathered rewards of all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.features.masking._selection import RETURNED_NAN, Selection, select

NONE, NAN, FAIL = math.nan, RETURNED_NAN, -math.inf


def of(
    *rows: Sequence[float], generations: int = 2, models: Collection[int] = (), cut: Collection[int] = ()
) -> Selection:
    """Decide for rows of rewards."""
    return select(rows, generations, models, set(cut))


def kinds(selection: Selection) -> dict[int, str]:
    """Why each sample leaves."""
    return {number: str(excluded.reason) for number, excluded in selection.samples.items()}


@pytest.mark.parametrize(("generations", "left"), [(2, {0: "failed", 1: "small_group"}), (1, {0: "failed"})])
def test_a_group_needs_two_survivors(generations: int, left: dict[int, str]) -> None:
    """Except in an evaluation with one completion a prompt, which has no baseline."""
    found = of([FAIL], [1], generations=generations)
    assert kinds(found) == left
    assert found.groups == (0,)


@pytest.mark.parametrize(
    ("rows", "generations", "models", "left", "not_applicable"),
    [
        ([[NONE], [NONE], [1], [2], [FAIL], [NONE], [1], [1]], 4, (), {4: "failed"}, {}),
        ([[FAIL], [NONE], [NONE], [1]], 4, (), {0: "failed", 3: "small_group"}, {}),
        ([[NAN, 1], [5, 2], [6, 3], [NAN, 1], [NAN, 2], [NAN, 3]], 3, (), {0: "nan"}, {0}),
        ([[FAIL, 1], [NAN, 2], [NAN, 3]], 3, (), {0: "failed"}, {0}),
        ([[NAN, NONE], [NAN, NONE]], 2, (), {0: "nan", 1: "nan"}, {}),
        ([[math.nan, 1], [math.inf, 1], [2, 1], [3, 1]], 4, [0], {0: "nan", 1: "infinite"}, {}),
    ],
    ids=[
        "a group of None only is left to TRL", "None alone is no survivor", "NaN of a whole group is None",
        "a failure beside NaN of the others", "NaN without any other reward", "a model cannot return None",
    ],
)  # fmt: skip
def test_what_none_and_nan_mean(
    rows: list[list[float]], generations: int, models: Collection[int], left: dict[int, str],
    not_applicable: set[int],
) -> None:  # fmt: skip
    """NaN is a failure unless the whole group has it: the function does not apply then, as with None."""
    found = of(*rows, generations=generations, models=models)
    assert kinds(found) == left
    assert set(found.not_applicable) == set(not_applicable)
    assert all(excluded.column in (0, None) for excluded in found.samples.values())


def test_cut_completions_do_not_count_as_failures() -> None:
    """They left before."""
    found = of([1], [FAIL], [2], [3], generations=4, cut=[0])
    assert kinds(found) == {0: "left out", 1: "failed"}


def test_no_reward_is_valid_whatever_each_sample_got_instead() -> None:
    """Zeros and equal rewards are valid; a completion that was cut has its reward."""
    for nothing in ([FAIL], [NAN], [NONE]):
        assert of([FAIL], nothing).none_valid
        assert of(nothing, nothing).none_valid
        assert not of(nothing, [0]).none_valid
        assert not of(nothing, [2], cut=[0, 1]).none_valid
    assert of([FAIL, 1], [1, FAIL]).none_valid
    assert not of([1], [1]).none_valid


rewards = st.sampled_from([0.0, 1.0, NONE, NAN, FAIL])


@given(
    st.lists(st.lists(rewards, min_size=2, max_size=2), min_size=8, max_size=8), st.sets(st.integers(0, 7))
)
def test_what_is_left_can_be_compared(table: list[list[float]], cut: set[int]) -> None:
    """In a group from which samples leave, none or two are left, and all of them have the same functions'
    rewards.

    `None` for some samples of a group is TRL's to handle.
    """
    found = select(table, 4, (), cut)
    assert cut <= set(found.samples)
    for group in range(2):
        rows = range(4 * group, 4 * group + 4)
        left = [row for row in rows if row not in found.samples and any(map(math.isfinite, table[row]))]
        if any(row in found.samples for row in rows):
            assert len(left) != 1
            assert (not left) == (group in found.groups)
        for column in range(2):
            values = [table[row][column] for row in left]
            assert FAIL not in values
            assert NAN not in values or not any(map(math.isfinite, values))
