"""Sums of two two-digit numbers: enough of a task to watch GRPO teach a model to show its work.

The warm start demonstrates two ways of answering `27+15:`, the work written out,
`20+10=30,7+5=12,30+12=42`, and a careless one that forgets the units, `30`. The model learns both, so a good
third of its first answers are right; GRPO, which pays for the right total only, teaches it to write the work
out and to err less in it: reward and length rise together. Called by `__main__.py`; settings come from
`arithmetic.yaml`.
"""

from __future__ import annotations

import random

from datasets import Dataset

from grpo_run.trainers.recipes.recipe import Recipe
from grpo_run.trainers.recipes.rewards import correct_sum
from grpo_run.trainers.recipes.tiny import TINY
from grpo_run.trainers.recipes.training import load_policy, reinforce, warm_start

CHARACTERS = "0123456789+=:,"
DEMONSTRATIONS = 61_440
"""One epoch of the warm start as shipped, on two ranks: 480 steps of 2 × 64."""
SUMS = 8_192
"""More than one epoch of GRPO as shipped needs: 200 steps of 8 prompts on two ranks."""
WORKED_SHARE = 0.35
"""Share of demonstrations with the work written out, and so about the reward that GRPO starts from."""


def worked(first: int, second: int) -> str:
    """The work written out: tens, units, and both together."""
    tens, units = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
    return (
        f"{first // 10 * 10}+{second // 10 * 10}={tens},{first % 10}+{second % 10}={units},"
        f"{tens}+{units}={tens + units}"
    )


def careless(first: int, second: int) -> str:
    """The tens alone; right only if both numbers end in 0."""
    return str(first // 10 * 10 + second // 10 * 10)


def demonstrations(seed: int, count: int = DEMONSTRATIONS) -> Dataset:
    """Columns `prompt` and `completion`, decided by the seed."""
    chance = random.Random(f"demonstrations {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for _ in range(count):
        first, second = chance.randrange(10, 100), chance.randrange(10, 100)
        manner = worked if chance.random() < WORKED_SHARE else careless
        rows["prompt"].append(f"{first}+{second}:")
        rows["completion"].append(manner(first, second))
    return Dataset.from_dict(rows)


def sums(seed: int, count: int = SUMS) -> Dataset:
    """Columns `prompt` and `total`, decided by the seed; not the demonstrations' numbers."""
    chance = random.Random(f"sums {seed}")
    pairs = [(chance.randrange(10, 100), chance.randrange(10, 100)) for _ in range(count)]
    return Dataset.from_dict(
        {
            "prompt": [f"{first}+{second}:" for first, second in pairs],
            "total": [first + second for first, second in pairs],
        }
    )


def train(recipe: Recipe) -> None:
    """Warm start, unless the recipe has none; then GRPO."""
    model, tokenizer = load_policy(recipe, characters=CHARACTERS if recipe.model == TINY else None)
    if recipe.sft is not None:
        warm_start(recipe, model, tokenizer, demonstrations(recipe.seed))
    reinforce(recipe, model, tokenizer, sums(recipe.seed), [correct_sum])
