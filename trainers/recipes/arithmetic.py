"""The arithmetic task: sums of two two-digit numbers, which a tiny model learns within minutes.

The warm start demonstrates two ways to answer `27+15:`, the calculation in steps, `20+10=30,7+5=12,30+12=42`,
and the tens alone, `30`. The model learns both, so about a third of its first answers are correct. GRPO
rewards only the correct total, so the model learns to write the steps and to make fewer mistakes in them:
reward and completion length rise together. Called by `__main__.py`; the settings are in `arithmetic.yaml`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from grpo_run.trainers.recipes.recipe import TINY, Recipe
from grpo_run.trainers.recipes.training import load_policy, train_grpo, warm_start
from grpo_run.trainers.rewards import Completion, completion_text

CHARACTERS = "0123456789+=:,"
DEMONSTRATIONS = 61_440
"""More than one epoch of the packaged warm start needs on two ranks: 360 steps of 2 x 64."""
SUMS = 8_192
"""More than one epoch of the packaged GRPO settings needs on two ranks: 120 steps of 8 prompts."""
STEPWISE_FRACTION = 0.35
"""Fraction of demonstrations with the calculation in steps; about the reward at the start of GRPO."""

_TOTAL = re.compile(r"(?:.*=)?([0-9]+)\s*", re.DOTALL)


def stepwise_answer(first: int, second: int) -> str:
    """Return the calculation in steps: tens, units, and their sum."""
    tens, units = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
    return (
        f"{first // 10 * 10}+{second // 10 * 10}={tens},{first % 10}+{second % 10}={units},"
        f"{tens}+{units}={tens + units}"
    )


def tens_answer(first: int, second: int) -> str:
    """Return the sum of the tens, which is correct only if both numbers end in 0."""
    return str(first // 10 * 10 + second // 10 * 10)


def demonstrations(seed: int, count: int = DEMONSTRATIONS) -> Dataset:
    """Return the warm start's data, determined by the seed: columns `prompt` and `completion`."""
    rng = random.Random(f"demonstrations {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for _ in range(count):
        first, second = rng.randrange(10, 100), rng.randrange(10, 100)
        answer = stepwise_answer if rng.random() < STEPWISE_FRACTION else tens_answer
        rows["prompt"].append(f"{first}+{second}:")
        rows["completion"].append(answer(first, second))
    return Dataset.from_dict(rows)


def sums(seed: int, count: int = SUMS) -> Dataset:
    """Return GRPO's data, determined by the seed: columns `prompt` and `total`."""
    rng = random.Random(f"sums {seed}")
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(count)]
    return Dataset.from_dict(
        {
            "prompt": [f"{first}+{second}:" for first, second in pairs],
            "total": [first + second for first, second in pairs],
        }
    )


def correct_sum(completions: Sequence[Completion], total: Sequence[int], **columns: Any) -> list[float]:
    """Return 1 if the text after the last `=` (all of it, if there is none) is the total, else 0."""
    scores = []
    for completion, expected in zip(completions, total, strict=True):
        match = _TOTAL.fullmatch(completion_text(completion))
        scores.append(float(match is not None and match[1] == str(expected)))
    return scores


def train(recipe: Recipe) -> None:
    """Train with the warm start, if the recipe has one, and then with GRPO."""
    model, tokenizer = load_policy(recipe, characters=CHARACTERS if recipe.model == TINY else None)
    if recipe.sft is not None:
        warm_start(recipe, model, tokenizer, demonstrations(recipe.seed))
    train_grpo(recipe, model, tokenizer, sums(recipe.seed), [correct_sum])
