"""The reward guard: a collapse is found within two rollouts, and noise raises no alarm."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from grpo_run.watchdog.learning.observations import Observation
from grpo_run.watchdog.learning.reward_collapse import find

SEEDS = 4
STEPS = 300


def first_alarm(values: list[float], limit: float | None = None) -> tuple[int, int] | None:
    """The first step after which there is an alarm, and its onset; steps count from 1."""
    series = [Observation(step, value) for step, value in enumerate(values, start=1)]
    for end in range(1, len(series) + 1):
        alarm = find(series[max(0, end - 256) : end], limit)
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
