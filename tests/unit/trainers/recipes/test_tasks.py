"""Data of the two tasks: determined by the seed, correct, and enough for one epoch."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from grpo_run.trainers.recipes import arithmetic, gsm8k
from grpo_run.trainers.recipes.problems import Problem
from grpo_run.trainers.recipes.recipe import load_recipe
from grpo_run.trainers.rewards import answer_format

PAIRS = [(first, second) for first in range(10, 100) for second in range(10, 100)]


def test_stepwise_answers_are_always_correct() -> None:
    """Every equation holds, and the last one gives the total."""
    for first, second in PAIRS:
        text = arithmetic.stepwise_answer(first, second)
        for left, right, result in re.findall(r"(\d+)\+(\d+)=(\d+)", text):
            assert int(left) + int(right) == int(result)
        assert arithmetic.correct_sum([text], total=[first + second]) == [1.0]


def test_tens_answers_are_seldom_correct() -> None:
    """Only if both numbers end in 0, so GRPO can improve the reward."""
    for first, second in PAIRS:
        correct = arithmetic.correct_sum([arithmetic.tens_answer(first, second)], total=[first + second]) == [
            1.0
        ]
        assert correct == (first % 10 == 0 and second % 10 == 0)


def test_answers_fit_the_completion_length() -> None:
    """The longest stepwise answer and its end token are not truncated."""
    longest = max(len(arithmetic.stepwise_answer(first, second)) for first, second in PAIRS)
    assert longest + 1 <= load_recipe("arithmetic").grpo["max_completion_length"]


@pytest.mark.parametrize("make", [arithmetic.demonstrations, arithmetic.sums])
def test_the_seed_determines_the_data(make: object) -> None:
    """The same rows on every rank and after every restart; different rows for another seed."""
    assert callable(make)
    assert make(3, 50).to_list() == make(3, 50).to_list()
    assert make(3, 50).to_list() != make(4, 50).to_list()


def test_the_fraction_of_stepwise_demonstrations_is_as_documented() -> None:
    """It determines the reward at the start of GRPO."""
    completions = arithmetic.demonstrations(0, 4000)["completion"]
    fraction = sum("=" in completion for completion in completions) / 4000
    assert fraction == pytest.approx(arithmetic.STEPWISE_FRACTION, abs=0.03)


def test_two_ranks_stay_within_one_epoch() -> None:
    """The test uses the packaged settings."""
    recipe = load_recipe("arithmetic")
    assert recipe.sft is not None
    sft, grpo = recipe.sft, recipe.grpo
    assert sft["max_steps"] * sft["per_device_train_batch_size"] * 2 <= arithmetic.DEMONSTRATIONS
    prompts_per_step = grpo["per_device_train_batch_size"] * 2 // grpo["num_generations"]
    assert grpo["max_steps"] * prompts_per_step <= arithmetic.SUMS


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_ask_for_the_rewarded_format(chat: bool) -> None:
    """The prompt contains the question and `####`, and the answer stays exact in the data set."""
    problem = Problem(question="How much?", answer=Decimal("1234567.10"), solution="#### 1,234,567.10")
    row = gsm8k.questions([problem], chat=chat)[0]
    text = "\n".join(message["content"] for message in row["prompt"]) if chat else row["prompt"]
    assert "How much?" in text
    assert "#### number" in text
    assert Decimal(row["answer"]) == problem.answer


def test_a_tenth_of_the_demonstrations_of_gsm8k_has_the_format() -> None:
    """The last step without calculator marks; with the line, all of it is what is rewarded."""
    solution = "First 2+3 = <<2+3=5>>5.\nThen 5+1 = <<5+1=6>>6 in all.\n#### 6"
    problems = [Problem(question="How many?", answer=Decimal(6), solution=solution)] * 2000
    rows = gsm8k.demonstrations(problems, seed=0)
    assert rows.to_list() == gsm8k.demonstrations(problems, seed=0).to_list()
    assert {*rows["completion"]} == {" Then 5+1 = 6 in all.", " Then 5+1 = 6 in all.\n#### 6"}
    formatted = sum(answer_format(rows["completion"])) / 2000
    assert formatted == pytest.approx(gsm8k.FORMATTED_FRACTION, abs=0.03)
    assert rows["prompt"][0] == gsm8k.prompt_for("How many?", chat=False)
