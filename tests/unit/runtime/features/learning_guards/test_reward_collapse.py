"""The reward guard: a collapse is found within two rollouts, and noise raises no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from grpo_run.runtime.features.learning_guards._judge import Observation, find_reward_collapse
from grpo_run.runtime.features.learning_guards.settings import LearningGuard

SEEDS = 4
STEPS = 300


def first_alarm(values: list[float], limit: float | None = None) -> tuple[int, int] | None:
    """The first step after which there is an alarm, and its onset; steps count from 1."""
    series = [Observation(step, value) for step, value in enumerate(values, start=1)]
    for end in range(1, len(series) + 1):
        alarm = find_reward_collapse(series[max(0, end - 256) : end], limit)
        if alarm is not None:
            return alarm.step, alarm.onset
    return None


def mean_of_successes(random: random.Random, chance: float, completions: int) -> float:
    """The mean reward of a rollout whose completions are right or wrong."""
    return sum(random.random() < chance for _ in range(completions)) / completions


NOISES: dict[str, Callable[[random.Random, int], float]] = {
    "gaussian around 0": lambda random, step: random.gauss(0, 1),
    "gaussian around 5": lambda random, step: random.gauss(5, 1),
    "offset": lambda random, step: 100 + random.gauss(0, 1),
    "half right, 4": lambda random, step: mean_of_successes(random, 0.5, 4),
    "mostly right, 4": lambda random, step: mean_of_successes(random, 0.95, 4),
    "mostly right, 2": lambda random, step: mean_of_successes(random, 0.9, 2),
    "hardly ever right, 8": lambda random, step: mean_of_successes(random, 0.03, 8),
    "learning": lambda random, step: mean_of_successes(random, min(0.95, step / 100), 8),
    "heavy tails": lambda random, step: random.gauss(0, 1) / max(0.05, random.random()),
    "length penalty": lambda random, step: -random.lognormvariate(3, 0.5),
    "constant": lambda random, step: 1.0,
}


@pytest.mark.parametrize("name", NOISES)
def test_noise_raises_no_alarm(name: str) -> None:
    """Tried with 20 seeds and 400 steps too."""
    for seed in range(SEEDS):
        source = random.Random(seed)
        assert first_alarm([NOISES[name](source, step) for step in range(STEPS)]) is None, seed


@pytest.mark.parametrize("name", ["gaussian around 5", "mostly right, 4", "learning", "constant"])
def test_a_collapse_to_nothing_is_found_within_two_steps(name: str) -> None:
    """Stopping at the onset needs the alarm then; the onset is exact."""
    for seed in range(SEEDS):
        source = random.Random(seed)
        values = [NOISES[name](source, step) for step in range(250)]
        scale = 4.0 if name.startswith("gaussian") else 0.0
        found = first_alarm([*values, *([-scale] * 10)])
        assert found is not None, seed
        assert 251 <= found[0] <= 253
        assert 249 <= found[1] <= 251


def test_a_gradual_collapse_is_found_before_it_is_complete() -> None:
    """The reward falls from 0.9 to 0 over 60 steps."""
    source = random.Random(1)
    values = [
        mean_of_successes(source, 0.9 * min(1.0, max(0.0, (210 - step) / 60)), 32) for step in range(260)
    ]
    found = first_alarm(values)
    assert found is not None
    assert 170 <= found[0] <= 200


def test_a_fall_of_a_reward_with_an_offset_is_found() -> None:
    """It loses a hundredth of its level, but far more than its spread."""
    source = random.Random(1)
    values = [100 + source.random() for _ in range(100)]
    assert first_alarm([*values, *([90.0] * 5)]) is not None


def test_a_quarter_less_is_no_collapse_but_the_limit_can_make_it_one() -> None:
    """A harder part of the data."""
    values = [1.0] * 100 + [0.75] * 50
    assert first_alarm(values) is None
    assert first_alarm(values, limit=0.2) == (103, 101)


def test_two_bad_rollouts_are_no_collapse() -> None:
    """A batch of hard prompts may come twice."""
    assert first_alarm([1.0] * 100 + [0.0, 0.0, 1.0] * 20) is None


def test_a_recovering_reward_is_no_collapse_again() -> None:
    """The level is that of before, and the reward is back."""
    assert first_alarm([1.0] * 60 + [0.0, 0.0] + [1.0] * 100) is None


def alternating(distance: float, count: int = 32) -> list[float]:
    """Values around 1 whose deviation is 1.4826 times the distance, by their median absolute deviation."""
    return [1.0 + distance, 1.0 - distance] * (count // 2)


OUTLIERS = [100.0, 99.0, 100.0, 101.0, 100.0, 100.0, 100.0, 100.0] * 4
"""A spread of 2 around 100, and differences of 1: the spread is what a fall is compared with."""
FAILURES = ([1.0] * 19 + [0.5]) * 4 + [1.0] * 10
"""Rare failures of a reward that is usually perfect: a deviation of 0.5 / 2.77, by the differences."""


@pytest.mark.parametrize(
    ("before", "last", "limit", "collapses"),
    [
        # three rollouts in a row, five deviations below the level
        (alternating(0.1), [0.258] * 3, None, True),
        (alternating(0.1), [0.26] * 3, None, False),
        (alternating(0.1), [0.258] * 2, None, False),
        (alternating(0.1), [0.258, 0.26, 0.258], None, False),
        (alternating(0.1, 14), [0.258] * 3, None, False),
        # twelve in a row, three deviations below it, and half of it lost
        (alternating(0.2), [0.11] * 12, None, True),
        (alternating(0.2), [0.11] * 11, None, False),
        (alternating(0.2), [0.12] * 12, None, False),
        (alternating(0.1), [0.5] * 12, None, True),
        (alternating(0.1), [0.51] * 12, None, False),
        (alternating(0.1), [0.51] * 12, 0.48, True),
        # no half is lost, but three times the spread
        (OUTLIERS, [94.0] * 3, None, True),
        (OUTLIERS, [94.1] * 12, None, False),
        # a fall within the noise of rare failures
        (FAILURES, [0.09] * 3, None, True),
        (FAILURES, [0.11] * 3, None, False),
        # noise of long ago does not count
        ([0.5, 1.5] * 20 + [1.0] * 70, [0.4] * 3, None, True),
        # a level of nothing has no half; a reward may be negative
        ([0.0] * 32, [-0.1] * 12, None, False),
        ([-1.0] * 32, [-1.6] * 3, None, True),
        ([-1.0] * 32, [-1.4] * 3, None, False),
    ],
)
def test_a_fall_just_beyond_the_bounds_is_a_collapse(
    before: list[float], last: list[float], limit: float | None, *, collapses: bool
) -> None:
    """Value by value: length, deviations, share, spread and noise."""
    series = [Observation(step, value) for step, value in enumerate([*before, *last], start=1)]
    assert (find_reward_collapse(series, limit) is not None) is collapses


def test_the_onset_is_the_first_value_nearer_to_the_present_than_to_the_level() -> None:
    """The fall takes several rollouts, of which the first is nearer to the level. Steps are not counted but
    read.
    """
    values = [1.0] * 40 + [0.7, 0.45, 0.1, 0.2, 0.15]
    alarm = find_reward_collapse(
        [Observation(3 * number, value) for number, value in enumerate(values)], None
    )
    assert alarm is not None
    assert (alarm.guard, alarm.onset, alarm.step) == (LearningGuard.reward, 3 * 41, 3 * 44)
    assert alarm.sentence == "The mean reward fell from 1 to 0.15 at step 123 and has stayed there."
