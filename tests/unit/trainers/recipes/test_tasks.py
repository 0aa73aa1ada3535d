"""The two tasks' data: decided by the seed, right where it should be, and long enough for one epoch."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from grpo_run.trainers.recipes import arithmetic, gsm8k
from grpo_run.trainers.recipes.problems import Problem
from grpo_run.trainers.recipes.recipe import load_recipe
from grpo_run.trainers.recipes.rewards import correct_sum

PAIRS = [(first, second) for first in range(10, 100) for second in range(10, 100)]


def test_written_work_is_always_right() -> None:
    """Every equation in it holds, and the last one gives the total."""
    for first, second in PAIRS:
        text = arithmetic.worked(first, second)
        for left, right, result in re.findall(r"(\d+)\+(\d+)=(\d+)", text):
            assert int(left) + int(right) == int(result)
        assert correct_sum([text], total=[first + second]) == [1.0]


def test_carelessness_seldom_pays() -> None:
    """Only where both numbers end in 0, so there is something to improve."""
    for first, second in PAIRS:
        paid = correct_sum([arithmetic.careless(first, second)], total=[first + second]) == [1.0]
        assert paid == (first % 10 == 0 and second % 10 == 0)


def test_answers_fit_the_completion_length() -> None:
    """The longest worked answer and its end token are not cut off."""
    longest = max(len(arithmetic.worked(first, second)) for first, second in PAIRS)
    assert longest + 1 <= load_recipe("arithmetic").grpo.max_completion_length


@pytest.mark.parametrize("make", [arithmetic.demonstrations, arithmetic.sums])
def test_the_seed_decides_the_data(make: object) -> None:
    """The same rows on every rank and after every restart; other rows for another seed."""
    assert callable(make)
    assert make(3, 50).to_list() == make(3, 50).to_list()
    assert make(3, 50).to_list() != make(4, 50).to_list()


def test_demonstrations_are_worked_as_often_as_promised() -> None:
    """The share of written work decides where GRPO starts from."""
    completions = arithmetic.demonstrations(0, 4000)["completion"]
    share = sum("=" in completion for completion in completions) / 4000
    assert share == pytest.approx(arithmetic.WORKED_SHARE, abs=0.03)


def test_two_ranks_stay_within_one_epoch() -> None:
    """As shipped: in a second epoch a resumed run would see another order."""
    recipe = load_recipe("arithmetic")
    assert recipe.sft is not None
    assert recipe.sft.max_steps * recipe.sft.per_device_train_batch_size * 2 <= arithmetic.DEMONSTRATIONS
    prompts_a_step = recipe.grpo.per_device_train_batch_size * 2 // recipe.grpo.num_generations
    assert recipe.grpo.max_steps * prompts_a_step <= arithmetic.SUMS


@pytest.mark.parametrize("chat", [False, True])
def test_questions_ask_for_the_form_that_is_paid(chat: bool) -> None:
    """The prompt holds the question and `####`; the answer stays exact on its way through the data set."""
    problem = Problem(question="How much?", answer=Decimal("1234567.10"), solution="#### 1,234,567.10")
    row = gsm8k.questions([problem], chat=chat)[0]
    text = "\n".join(message["content"] for message in row["prompt"]) if chat else row["prompt"]
    assert "How much?" in text
    assert "#### number" in text
    assert Decimal(row["answer"]) == problem.answer
