"""The GSM8K task: word problems, with rewards for the correct number and for its format.

Called by `__main__.py`; the settings are in `gsm8k.yaml`. The problems come from the Hugging Face Hub
(`openai/gsm8k`, configuration `main`), or from local JSON lines if the recipe sets `data`.

The `tiny` model, which nothing has been taught, starts with the last step of solutions, of which a tenth has
the `####` line. So about a tenth of its first answers has the format, and GRPO raises that; the answers stay
wrong.
"""

from __future__ import annotations

import random
import re
from typing import Any

from datasets import Dataset, load_dataset

from grpo_run.trainers.recipes.problems import Problem, checked_problem, read_problems
from grpo_run.trainers.recipes.recipe import TINY, Recipe
from grpo_run.trainers.recipes.training import load_policy, train_grpo, warm_start
from grpo_run.trainers.rewards import MARKER, answer_format, correct_answer

HUB_NAME, HUB_CONFIGURATION = "openai/gsm8k", "main"
INSTRUCTION = (
    "Solve the problem step by step. End with a line that holds only the final number, in the form '####"
    " number'."
)
FORMATTED_FRACTION = 0.1
"""Fraction of demonstrations with the `####` line; about the format's reward at the start of GRPO."""
TOKENIZER_PROBLEMS = 1000
"""Enough to learn a vocabulary from, in a fraction of a second, at every start."""

_CALCULATION = re.compile(r"<<[^<>\n]*>>")


def without_calculator(solution: str) -> str:
    """Return a reference solution without the marks for a calculator, such as `<<48/2=24>>`."""
    return _CALCULATION.sub("", solution)


def problems_of(recipe: Recipe, split: str = "train") -> list[Problem]:
    """Return the problems of a split, from the recipe's `data` or from the Hub."""
    if recipe.data is not None:
        return read_problems(recipe.data, split)
    rows = load_dataset(HUB_NAME, HUB_CONFIGURATION, split=split)
    return [checked_problem(row, f"{HUB_NAME}, {split} row {number}") for number, row in enumerate(rows)]


def prompt_for(question: str, *, chat: bool) -> Any:
    """Return the prompt for a question: a conversation if the tokenizer has a chat template, else plain
    text.
    """
    if chat:
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return f"{INSTRUCTION}\n\nProblem: {question}\nSolution:"


def questions(problems: list[Problem], *, chat: bool) -> Dataset:
    """Return the data set with columns `prompt` and `answer`. Answers are text, so that they stay exact."""
    return Dataset.from_dict(
        {
            "prompt": [prompt_for(problem.question, chat=chat) for problem in problems],
            "answer": [str(problem.answer) for problem in problems],
        }
    )


def demonstrations(problems: list[Problem], seed: int) -> Dataset:
    """Return the tiny model's warm start, determined by the seed: columns `prompt` and `completion`."""
    rng = random.Random(f"demonstrations {seed}")
    rows: dict[str, list[str]] = {"prompt": [], "completion": []}
    for problem in problems:
        steps, _, number = without_calculator(problem.solution).rpartition(MARKER)
        last = steps.strip().rpartition("\n")[2]
        formatted = rng.random() < FORMATTED_FRACTION
        rows["prompt"].append(prompt_for(problem.question, chat=False))
        rows["completion"].append(f" {last}\n{MARKER}{number}" if formatted else f" {last}")
    return Dataset.from_dict(rows)


def train(recipe: Recipe) -> None:
    """Train with the warm start, if the recipe has one, and then with GRPO."""
    problems = problems_of(recipe)
    texts = [
        f"{prompt_for(one.question, chat=False)} {one.solution}" for one in problems[:TOKENIZER_PROBLEMS]
    ]
    model, tokenizer = load_policy(recipe, texts=texts if recipe.model == TINY else None)
    if recipe.sft is not None:
        warm_start(recipe, model, tokenizer, demonstrations(problems, recipe.seed))
    dataset = questions(problems, chat=tokenizer.chat_template is not None)
    train_grpo(recipe, model, tokenizer, dataset, [correct_answer, answer_format])
