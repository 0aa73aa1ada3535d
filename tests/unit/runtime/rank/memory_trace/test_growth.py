"""What counts as growth: something of each of several steps, after the first ones."""

from __future__ import annotations

import pytest

from grpo_run.runtime.rank.memory_trace.growth import (
    ENOUGH,
    ENOUGH_IF_BOUNDED,
    FIRST_STEPS,
    SUSPICIOUS,
    grows,
    steady_births,
)


def grown(births: list[int], *, now: int, bounded: bool = False) -> bool:
    """Whether a holder with tensors of these steps is reported in a script whose first step was looked at."""
    return grows(births, first=1, now=now, bounded=bounded)


def test_what_was_made_in_the_first_steps_never_counts() -> None:
    """State of an optimizer, caches and buffers are made there, however many tensors they are."""
    assert not grown([1] * 500 + [FIRST_STEPS] * 500, now=50)


def test_a_holder_of_each_step_grows() -> None:
    """And one step less is not enough."""
    begin = 1 + FIRST_STEPS
    steps = list(range(begin, begin + ENOUGH))
    assert grown(steps, now=steps[-1])
    assert not grown(steps[:-1], now=steps[-2])


def test_many_tensors_of_one_step_are_no_growth() -> None:
    """A single number is no evidence."""
    assert not grown([7] * 10_000, now=8)


def test_a_cache_that_has_filled_is_no_growth() -> None:
    """Nothing is added any more, for many times longer than before."""
    assert not grown([3, 4, 5, 6, 7, 8], now=40)


def test_growth_once_per_rollout_counts() -> None:
    """A rollout may serve many optimizer steps; nothing is added between."""
    assert grown([8, 16, 24, 32, 40], now=45)


def test_a_holder_whose_code_bounds_it_has_to_grow_for_much_longer() -> None:
    """A replay buffer grows until it is full."""
    steps = list(range(3, 3 + ENOUGH_IF_BOUNDED))
    assert not grown(steps[:-1], now=steps[-2], bounded=True)
    assert grown(steps, now=steps[-1], bounded=True)


@pytest.mark.parametrize(("births", "suspicious"), [([3, 4], False), ([3, 4, 5], True)])
def test_sites_are_recorded_after_three_steps(births: list[int], suspicious: bool) -> None:
    """Steps of a healthy script are not slowed down."""
    assert (len(steady_births(births, first=1, now=5)) >= SUSPICIOUS) is suspicious
