"""Data of `memgen-arithmetic`: right where it says so, outdated where the reasoner must not learn."""

from __future__ import annotations

from grpo_run.trainers.recipes import chains
from grpo_run.trainers.recipes.chains import HARD, LABELS, OUTDATED, PAUSE, PERMUTATION, STEPS, Chain
from grpo_run.trainers.recipes.recipe import load_recipe


def test_the_example_of_the_docstring() -> None:
    """Each step of it, by its rule."""
    chain = Chain(4, "+#=-#+-=")
    assert f"prompt       {chain.prompt}\n" in (chains.__doc__ or "")
    assert f"completion   {''.join(chain.steps())}\n" in (chains.__doc__ or "")


def test_solutions_follow_the_permutation() -> None:
    """Each step goes on from the digit before."""
    assert sorted(PERMUTATION) == list(range(10))
    for chain in chains.chains("test", 300):
        digit = chain.start
        for text, label, sign in zip(chain.steps(), LABELS, chain.operations, strict=True):
            easy = {"+": (digit + 1) % 10, "-": (digit - 1) % 10, "=": digit}
            digit = PERMUTATION[digit] if sign == HARD else easy[sign]
            assert text == f"{label}{sign}{digit}"


def test_pretraining_never_shows_the_permutation() -> None:
    """Without a note, a hard step follows the outdated one, which agrees with the other nowhere."""
    assert sorted(OUTDATED) == list(range(10))
    assert all(old != new for old, new in zip(OUTDATED, PERMUTATION, strict=True))
    notes = 0
    for prompt, *parts in chains.pretraining_rows(0, 200)["parts"]:
        digit = int(prompt[-1])
        for start, read, result in zip(parts[::4], parts[1::4], parts[2::4], strict=True):
            if read.strip(PAUSE):
                notes += 1
                assert read == result + PAUSE
            elif start[1] == HARD:
                assert int(result) == OUTDATED[digit]
            digit = int(result)
    assert notes > 200


def test_hard_steps_are_anywhere_and_within_the_budget() -> None:
    """So the first delimiters are not enough, and a trigger that fires at hard steps only always is."""
    sizes = load_recipe("memgen-arithmetic").memgen
    assert sizes is not None
    found = chains.chains("test", 500)
    assert {chain.operations.count(HARD) for chain in found} == set(range(1, chains.HARD_STEPS[1] + 1))
    assert chains.HARD_STEPS[1] <= sizes.augmentations < STEPS
    assert sizes.augmentations == chains.WOVEN_STEPS
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
        assert HARD not in completion[3 * chains.WOVEN_STEPS :], "memory does not reach it"
        assert not chains.is_held_out(chain)
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
