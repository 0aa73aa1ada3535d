"""The task of `memgen-arithmetic`: chains of steps with one digit each, of which the reasoner knows three
kinds.

    prompt       A+B#C=D-E#F+G-H=:4
    completion   A+5B#1C=1D-0E#3F+4G-3H=3

A step writes its label, its operation and the resulting digit. Operations are the delimiters, so there are
more than the memory's budget. The reasoner is pre-trained on chains in which `+`, `-` and `=` are right
and the result of `#` is a random digit, from which the chain goes on: it knows the format, and cannot know
`#`, which is a fixed permutation of the digits. The weaver is trained on right chains. So memory helps after
`#` only, and these may be anywhere. Called by `memgen.py`.

Labels lead from step to step, and pre-training has pauses after operations, which are read and never
written. So the reasoner does not count tokens, and latents between them do not disturb it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

LABELS = "ABCDEFGH"
STEPS = len(LABELS)
"""Steps of a chain, each with one delimiter; the packaged budget is 5 augmentations."""
EASY, HARD, PAUSE = "+-=", "#", "."
DELIMITERS = EASY + HARD
CHARACTERS = "0123456789:" + DELIMITERS + PAUSE + LABELS
PERMUTATION = (3, 8, 5, 0, 9, 1, 7, 2, 6, 4)
"""Result of the hard operation for each digit."""
MOST_HARD = 4
"""Hard steps of a chain, at least one; fewer than the budget."""
MOST_PAUSES = 2
GIVEN_STEPS = 3
"""Most steps of a demonstration that belong to its prompt."""


class Chain(NamedTuple):
    """A problem: the digit at the start, and the operation of each step."""

    start: int
    operations: str

    @property
    def prompt(self) -> str:
        pairs = zip(LABELS, self.operations, strict=True)
        return "".join(label + operation for label, operation in pairs) + f":{self.start}"

    def steps(self, guess: random.Random | None = None) -> list[str]:
        """Return the text of each step; with `guess`, hard ones have random results."""
        digit, texts = self.start, []
        for label, operation in zip(LABELS, self.operations, strict=True):
            if operation == HARD:
                digit = PERMUTATION[digit] if guess is None else guess.randrange(10)
            else:
                digit = (digit + {"+": 1, "-": -1, "=": 0}[operation]) % 10
            texts.append(f"{label}{operation}{digit}")
        return texts


def chains(seed: str, count: int, *, held_out: bool = False) -> list[Chain]:
    """Return chains that the seed determines, each with one to `MOST_HARD` hard steps, anywhere. No chain is
    both among the held-out ones and among the others.
    """
    rng = random.Random(seed)
    found: list[Chain] = []
    while len(found) < count:
        hard = set(rng.sample(range(STEPS), rng.randint(1, MOST_HARD)))
        operations = "".join(HARD if step in hard else rng.choice(EASY) for step in range(STEPS))
        chain = Chain(rng.randrange(10), operations)
        if (zlib.crc32(chain.prompt.encode()) % 10 == 0) == held_out:
            found.append(chain)
    return found


def pretraining_rows(seed: int, count: int) -> dict[str, list[str]]:
    """Return the reasoner's data: hard steps are random, and operations are followed by pauses."""
    rng = random.Random(f"guesses {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for chain in chains(f"pre-training {seed}", count):
        steps = [step[:2] + PAUSE * rng.randint(0, MOST_PAUSES) + step[2:] for step in chain.steps(rng)]
        rows["prompt"].append(chain.prompt)
        rows["completion"].append("".join(steps))
    return rows


def demonstrations(seed: int, count: int) -> dict[str, list[str]]:
    """Return the weaver's data: right chains. Some steps belong to the prompt already, so that the weaver,
    which is trained at the first delimiters only, sees all steps.
    """
    rng = random.Random(f"given steps {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for chain in chains(f"demonstrations {seed}", count):
        steps, given = chain.steps(), rng.randint(0, GIVEN_STEPS)
        rows["prompt"].append(chain.prompt + "".join(steps[:given]))
        rows["completion"].append("".join(steps[given:]))
    return rows


def correct_chain(completions: Sequence[str], solution: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 if every step is right, else 0."""
    return [float(text == expected) for text, expected in zip(completions, solution, strict=True)]
