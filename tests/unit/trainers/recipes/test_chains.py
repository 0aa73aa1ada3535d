"""Data of `memgen-arithmetic`: right where it says so, random where the reasoner must not learn."""

from __future__ import annotations

import random
import re
from collections import defaultdict

from grpo_run.trainers.recipes import chains
from grpo_run.trainers.recipes.chains import EASY, HARD, LABELS, PAUSE, PERMUTATION, STEPS, Chain
from grpo_run.trainers.recipes.recipe import load_recipe

STEP = re.compile(rf"([A-Z])([{re.escape(EASY + HARD)}])({re.escape(PAUSE)}*)(\d)")


def test_the_example_of_the_docstring() -> None:
    """Each step of it, by its rule."""
    chain = Chain(4, "+#=-#+-=")
    assert f"prompt       {chain.prompt}\n" in (chains.__doc__ or "")
    assert f"completion   {''.join(chain.steps())}\n" in (chains.__doc__ or "")


def test_solutions_are_right_and_pretraining_guesses_hard_steps() -> None:
    """Easy steps go on from the digit before, in both; a hard one is the permutation, or any digit."""
    assert sorted(PERMUTATION) == list(range(10))
    seen: dict[int, set[int]] = defaultdict(set)
    for chain in chains.chains("test", 300):
        for guess in (None, random.Random(str(chain))):
            digit = chain.start
            for text, label in zip(chain.steps(guess), LABELS, strict=True):
                match = STEP.fullmatch(text)
                assert match is not None
                assert match[1] == label
                result = int(match[4])
                if match[2] == HARD:
                    assert guess is not None or result == PERMUTATION[digit]
                    seen[digit].add(result) if guess else None
                else:
                    assert result == (digit + {"+": 1, "-": -1, "=": 0}[match[2]]) % 10
                digit = result
    assert all(len(seen[digit]) == 10 for digit in range(10))


def test_hard_steps_are_anywhere_and_within_the_budget() -> None:
    """So the first delimiters are not enough, and a trigger that fires at hard steps only always is."""
    sizes = load_recipe("memgen-arithmetic").memgen
    assert sizes is not None
    found = chains.chains("test", 500)
    assert {chain.operations.count(HARD) for chain in found} == set(range(1, chains.MOST_HARD + 1))
    assert chains.MOST_HARD <= sizes.augmentations < STEPS
    assert {place for chain in found for place, sign in enumerate(chain.operations) if sign == HARD} == set(
        range(STEPS)
    )


def test_demonstrations_give_some_steps_and_stay_right() -> None:
    """Prompt and completion together are a right chain, and the weaver sees every step."""
    rows = chains.demonstrations(0, 200)
    starts = set()
    for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True):
        program, _, steps = (prompt + completion).partition(":")
        chain = Chain(int(steps[0]), program[1::2])
        assert steps[1:] == "".join(chain.steps())
        starts.add(completion[0])
    assert starts == set(LABELS[: chains.GIVEN_STEPS + 1])


def test_the_evaluation_has_other_problems_than_training() -> None:
    """No stage has seen them."""
    held_out = set(chains.chains("held out", 500, held_out=True))
    assert not held_out & set(chains.chains("problems 0", 20_000))


def test_only_a_right_chain_scores() -> None:
    """One wrong step is a wrong chain."""
    solution = "".join(Chain(4, "+#=-#+-=").steps())
    wrong = solution[:-1] + str((int(solution[-1]) + 1) % 10)
    assert chains.correct_chain([solution, wrong, ""], [solution] * 3) == [1.0, 0.0, 0.0]
