"""The task of `memgen-arithmetic`: chains of steps with one digit each, of which the reasoner knows three
kinds.

    prompt       A+B#C=D-E#F+G-H=:4
    completion   A+5B#1C=1D-0E#3F+4G-3H=3

A step writes its label, its operation and the resulting digit. Operations are the delimiters, so there are
more than the memory's budget. `#` is a fixed permutation of the digits. The reasoner is pre-trained with an
outdated permutation, so it is wrong at every `#` and right elsewhere; the weaver is trained on right chains.
So memory helps after `#` only, and these may be anywhere. Called by `memgen.py`.

Labels lead from step to step, and in pre-training some operations are followed by pauses, `.`, or by a note,
`5.`, a random digit that overrides the operation. The reasoner learns to read these, and not to write any. So
it does not count tokens, and it can use memory.
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
OUTDATED = (5, 2, 9, 7, 1, 8, 0, 6, 4, 3)
"""What the reasoner learns in pre-training instead; no digit has the same result."""
HARD_STEPS = (1, 4)
"""Fewest and most hard steps of a problem; the budget suffices for all of them."""
DEMONSTRATED_HARD_STEPS = (2, 7)
"""Of a demonstration: more, because the weaver has something to learn at these only."""
NOTES = 0.35
"""Share of steps of pre-training with a note."""
GIVEN_STEPS = 3
"""Most steps of a demonstration that belong to its prompt."""
WOVEN_STEPS = 5
"""Steps of a demonstration that memory reaches: the packaged budget."""


class Chain(NamedTuple):
    """A problem: the digit at the start, and the operation of each step."""

    start: int
    operations: str

    @property
    def prompt(self) -> str:
        pairs = zip(LABELS, self.operations, strict=True)
        return "".join(label + operation for label, operation in pairs) + f":{self.start}"

    def steps(self) -> list[str]:
        """Return the text of each step."""
        digit, texts = self.start, []
        for label, operation in zip(LABELS, self.operations, strict=True):
            digit = result(digit, operation, PERMUTATION)
            texts.append(f"{label}{operation}{digit}")
        return texts


def result(digit: int, operation: str, permutation: Sequence[int]) -> int:
    """Return the result of a step."""
    if operation == HARD:
        return permutation[digit]
    return (digit + {"+": 1, "-": -1, "=": 0}[operation]) % 10


def chains(
    seed: str, count: int, *, hard_steps: tuple[int, int] = HARD_STEPS, held_out: bool = False
) -> list[Chain]:
    """Return chains that the seed determines. No chain is both among the held-out ones and among the others.

    Args:
        hard_steps: fewest and most hard steps of a chain, which may be anywhere.
    """
    rng = random.Random(seed)
    found: list[Chain] = []
    while len(found) < count:
        hard = set(rng.sample(range(STEPS), rng.randint(*hard_steps)))
        operations = "".join(HARD if step in hard else rng.choice(EASY) for step in range(STEPS))
        chain = Chain(rng.randrange(10), operations)
        if is_held_out(chain) == held_out:
            found.append(chain)
    return found


def is_held_out(chain: Chain) -> bool:
    """Whether a chain is for the evaluation only: one in ten, by a checksum."""
    return zlib.crc32(chain.prompt.encode()) % 10 == 0


def pretraining_rows(seed: int, count: int) -> dict[str, list[list[str]]]:
    """Return the reasoner's data: a column `parts`, texts that are read and texts that are learned in turn.
    Hard steps follow the outdated permutation, and some operations are followed by pauses or a note.
    """
    rng = random.Random(f"notes {seed}")
    rows = []
    for chain in chains(f"pre-training {seed}", count):
        parts, digit = [chain.prompt], chain.start
        for label, operation in zip(LABELS, chain.operations, strict=True):
            if rng.random() < NOTES:
                digit = rng.randrange(10)
                read = f"{digit}{PAUSE}"
            else:
                digit = result(digit, operation, OUTDATED)
                read = rng.choice(("", "", PAUSE, PAUSE * 2))
            parts += [label + operation, read, str(digit), ""]
        rows.append(parts)
    return {"parts": rows}


def demonstrations(seed: int, count: int) -> dict[str, list[str]]:
    """Return the weaver's data, at most `count` rows: right chains. Some steps belong to the prompt already,
    so that the weaver, which is trained at the first delimiters only, sees all steps. Later steps are easy:
    a hard one without memory would be a loss that the weaver cannot reduce.
    """
    rng = random.Random(f"given steps {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for drawn in chains(f"demonstrations {seed}", count, hard_steps=DEMONSTRATED_HARD_STEPS):
        given = rng.randint(0, GIVEN_STEPS)
        reached = given + WOVEN_STEPS
        later = "".join(rng.choice(EASY) if sign == HARD else sign for sign in drawn.operations[reached:])
        chain = Chain(drawn.start, drawn.operations[:reached] + later)
        if is_held_out(chain):
            continue
        steps = chain.steps()
        rows["prompt"].append(chain.prompt + "".join(steps[:given]))
        rows["completion"].append("".join(steps[given:]))
    return rows


def correct_chain(completions: Sequence[str], solution: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 if every step is right, else 0."""
    return [float(text == expected) for text, expected in zip(completions, solution, strict=True)]
