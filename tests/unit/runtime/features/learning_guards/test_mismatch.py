"""The mismatch guard: weights that do not reach vLLM are found, and healthy engines raise no alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from grpo_run.runtime.features.learning_guards._judge import MAX_LENGTH, Observation, find_mismatch

SEEDS = 4
STEPS = 600
Value = Callable[[random.Random, int], float]


def first_alarm(value: Value, seed: int = 0, steps: int = STEPS) -> tuple[int, int] | None:
    """The first step after which there is an alarm, and its onset; steps count from 1."""
    source = random.Random(seed)
    series = [Observation(step, value(source, step)) for step in range(1, steps + 1)]
    for end in range(1, steps + 1):
        alarm = find_mismatch(series[max(0, end - MAX_LENGTH) : end], None)
        if alarm is not None:
            return alarm.step, alarm.onset
    return None


def around(random: random.Random, level: float, spread: float = 0.2) -> float:
    """A value that varies by a share of its level."""
    return random.lognormvariate(math.log(level), spread)


HEALTHY: dict[str, Value] = {
    "bf16": lambda random, step: around(random, 0.015),
    "fp32, tiny model": lambda random, step: around(random, 1e-7, 1.0),
    "fp32, then other kernels": lambda random, step: around(random, 1e-7 if step < 300 else 1e-4),
    "exactly equal": lambda random, step: 0.0,
    "completions that become longer": lambda random, step: around(random, 0.01 + 0.06 * step / STEPS),
    "experts, noisy": lambda random, step: around(random, 0.06, 0.4),
    "fp8, and an entropy that doubles": lambda random, step: around(random, 0.05 * (1 + step / STEPS)),
    "top_p 0.9": lambda random, step: 0.1 + around(random, 0.012),
    "top_k, base model": lambda random, step: around(random, 1.7, 0.1),
    "a policy that becomes certain and explores again": lambda random, step: around(
        random, 0.02 * (0.1 + abs(1 - 2 * step / STEPS))
    ),
    "few tokens, heavy tails": lambda random, step: around(random, 0.015, 1.0),
    "a bad rollout now and then": lambda random, step: 0.5 if step % 7 == 0 else around(random, 0.015),
    "batches that are all masked": lambda random, step: 0.0 if step % 3 else around(random, 0.015),
    "four hard batches in a row": lambda random, step: 0.3 if step % 50 < 4 else around(random, 0.015),
}
"""What engines show that have the weights: by kind, the mean difference of a rollout."""


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_engine_raises_no_alarm(name: str) -> None:
    """Tried with 40 seeds and 2,000 steps too."""
    for seed in range(SEEDS):
        assert first_alarm(HEALTHY[name], seed) is None, seed


@pytest.mark.parametrize(
    ("stale", "within"),
    [
        # a real run with a high learning rate: 0.010 and 0.018 in the warm-up, then 0.2
        (lambda random, step: (0.010, 0.018)[step - 1] if step < 3 else around(random, 0.2), (8, 8)),
        (lambda random, step: around(random, 0.015 if step < 100 else 0.201), (104, 104)),
        (lambda random, step: around(random, 0.06, 0.4) if step < 100 else around(random, 0.8), (104, 104)),
        # the weights move away from those that vLLM has, from the first step on, or later
        (lambda random, step: around(random, 0.015 + 0.005 * step), (40, 120)),
        (lambda random, step: around(random, 0.015 + 0.002 * max(0, step - 100)), (140, 180)),
    ],
    ids=["real run", "at once", "experts", "from the start", "from step 100"],
)
def test_an_engine_with_old_weights_is_found(stale: Value, within: tuple[int, int]) -> None:
    """Five rollouts after the difference is far above the beginning."""
    for seed in range(SEEDS):
        found = first_alarm(stale, seed)
        assert found is not None, seed
        assert within[0] <= found[0] <= within[1]
        assert found[1] == found[0] - 4
