"""What counts as growth: something of each of several steps, after the first ones, and what will not fit."""

from __future__ import annotations

import pytest

from grpo_run.runtime.rank.memory_trace._growth import (
    FIRST_STEPS,
    Gain,
    HolderSizes,
    LongerTensors,
    Made,
    steady_births,
)


def steps_of(births: list[int], *, now: int) -> int:
    """Of how many steps a holder has tensors in a script whose first step was looked at."""
    return len(steady_births(births, first=1, now=now))


@pytest.mark.parametrize(
    ("births", "now", "steps"),
    [
        ([1] * 500 + [FIRST_STEPS] * 500, 50, 0),
        ([3, 4, 5, 6, 7], 7, 5),
        ([7] * 10_000, 8, 1),
        ([3, 4, 5, 6, 7, 8], 40, 0),
        ([8, 16, 24, 32, 40], 45, 5),
    ],
    ids=["the first steps", "each step", "one step", "a cache that has filled", "each rollout"],
)
def test_steps_count_that_something_still_has_tensors_of(births: list[int], now: int, steps: int) -> None:
    """Not the first ones, and none once nothing is added any more."""
    assert steps_of(births, now=now) == steps


def held(*births: int) -> list[tuple[int, int]]:
    """Storages of 10 bytes of these steps."""
    return [(born, 10) for born in births]


def test_a_holder_has_grown_since_it_was_looked_at_first() -> None:
    """Two looks at least; the figures are since growth began."""
    sizes = HolderSizes()
    assert sizes.look(5, held(*range(5))) is None
    assert sizes.look(10, held(*range(11))) == Gain(110, 60, 5)
    assert sizes.look(15, held(*range(16))) == Gain(160, 110, 10)


@pytest.mark.parametrize("later", [range(6, 11), range(3, 11), range(5)])
def test_a_holder_that_replaces_what_it_holds_has_not_grown(later: range) -> None:
    """All of it, or most; nor has one to which nothing was added. Growth is measured anew from there."""
    sizes = HolderSizes()
    sizes.look(5, held(*range(5)))
    assert sizes.look(10, held(*later)) is None
    assert sizes.look(15, held(*later, 11, 12)) == Gain(10 * len(later) + 20, 20, 5)


@pytest.mark.parametrize(
    ("gain", "steps_left", "free_bytes", "outgrows"),
    [
        (Gain(20, 20, 10), 100, 100, True),
        (Gain(20, 20, 10), 40, 100, False),
        (Gain(10, 10, 10), 1000, 100, False),
        (Gain(20, 20, 10), 0, 100, False),
        (Gain(20, 20, 10), 100, 0, False),
    ],
    ids=["will not fit", "will fit", "little so far", "steps unknown", "memory unknown"],
)
def test_what_does_not_fit_until_the_end_is_an_alarm(
    gain: Gain, steps_left: int, free_bytes: int, outgrows: bool
) -> None:
    """Once it takes a tenth of what was free, and only if the end and the memory are known."""
    assert gain.outgrows(steps_left=steps_left, free_bytes=free_bytes) is outgrows


def test_steps_with_a_longer_tensor_are_counted_in_a_row() -> None:
    """Lengths that the step before had too are of others; one that is shorter begins again."""
    watch = LongerTensors()

    def counted(step: int, *lengths: int) -> list[int]:
        made = [Made(length, "float32", (length, 20), 80 * length) for length in lengths]
        return [one.steps for one in watch.step_ended(step, made)]

    assert counted(1, 5, 90) == []
    assert counted(2, 7, 90) == []
    assert counted(3, 9, 90) == [1]
    assert counted(5, 90) == []
    assert counted(6, 12, 90) == [2]
    assert counted(7, 11, 90) == []
