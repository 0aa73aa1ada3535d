"""The task of `memgen-arithmetic`: chains of calculations modulo 10, of which the reasoner knows one kind.

    prompt       3a+4b*7c+1:
    completion   a+4=7,b*7=9,c+1=0

Labels lead from step to step, so that latents between tokens do not disturb a model that counts positions.
The reasoner is pre-trained on chains in which sums are right and products are random digits, so it can follow
a chain and add, and has no way to multiply. The weaver is trained on right chains. There are two delimiters
in each step, `=` and `,`, so more than the memory's budget, and memory helps only after the `=` of a product.
Called by `memgen.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

LABELS = "abcdef"
CHARACTERS = "0123456789+*=,:" + LABELS
DELIMITERS = "=,"
STEPS = len(LABELS)
"""Steps of a chain: 11 delimiters, of which the budget of 5 reaches the `=` of the first three steps."""
MOST_PRODUCTS = 3
FACTORS = range(2, 10)


class Chain(NamedTuple):
    """A problem: the first number, and the operation and number of each step."""

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def prompt(self) -> str:
        steps = zip(LABELS, self.steps, strict=True)
        return str(self.start) + "".join(f"{label}{sign}{number}" for label, (sign, number) in steps) + ":"

    def solution(self, guess: random.Random | None = None) -> str:
        """Return the calculation; with `guess`, products are random digits, from which it goes on."""
        value, parts = self.start, []
        for label, (sign, number) in zip(LABELS, self.steps, strict=True):
            if sign == "+":
                value = (value + number) % 10
            else:
                value = value * number % 10 if guess is None else guess.randrange(10)
            parts.append(f"{label}{sign}{number}={value}")
        return ",".join(parts)

    @property
    def answer(self) -> str:
        """The last digit of the calculation."""
        return self.solution()[-1]


def chains(seed: str, count: int) -> list[Chain]:
    """Return chains that the seed determines; each has one to `MOST_PRODUCTS` products, anywhere."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        products = set(rng.sample(range(STEPS), rng.randint(1, MOST_PRODUCTS)))
        steps = tuple(
            ("*", rng.choice(FACTORS)) if number in products else ("+", rng.randrange(1, 10))
            for number in range(STEPS)
        )
        found.append(Chain(rng.randrange(10), steps))
    return found


def pretraining_rows(seed: int, count: int) -> dict[str, list[str]]:
    """Return the reasoner's data: right sums, random products."""
    rng = random.Random(f"guesses {seed}")
    problems = chains(f"pre-training {seed}", count)
    return {
        "prompt": [chain.prompt for chain in problems],
        "completion": [chain.solution(rng) for chain in problems],
    }


def demonstrations(seed: int, count: int) -> dict[str, list[str]]:
    """Return the weaver's data: right calculations. In each, some steps belong to the prompt already, so that
    the weaver, which is trained at the first delimiters only, sees all steps.
    """
    rng = random.Random(f"given steps {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for chain in chains(f"demonstrations {seed}", count):
        steps = chain.solution().split(",")
        given = rng.randrange(STEPS - 1)
        rows["prompt"].append(chain.prompt + "".join(f"{step}," for step in steps[:given]))
        rows["completion"].append(",".join(steps[given:]))
    return rows


def correct_chain(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 if the number after the last `=` is the answer, else 0."""
    return [
        float(text.rpartition("=")[2] == expected) for text, expected in zip(completions, answer, strict=True)
    ]
