"""The GSM8K task: word problems, with rewards for the correct number and for its format.

Called by `__main__.py`; the settings are in `gsm8k.yaml`. The problems come from the Hugging Face Hub
(`openai/gsm8k`, configuration `main`), or from local JSON lines if the recipe sets `data`.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_dataset

from grpo_run.trainers.recipes.problems import Problem, checked_problem, read_problems
from grpo_run.trainers.recipes.recipe import Recipe
from grpo_run.trainers.recipes.rewards import answer_format, correct_answer
from grpo_run.trainers.recipes.training import load_policy, train_grpo

HUB_NAME, HUB_CONFIGURATION = "openai/gsm8k", "main"
INSTRUCTION = (
    "Solve the problem step by step. End with a line that holds only the final number, in the form '####"
    " number'."
)


def problems_of(recipe: Recipe) -> list[Problem]:
    """Return the training problems, from the recipe's `data` or from the Hub."""
    if recipe.data is not None:
        return read_problems(recipe.data)
    rows = load_dataset(HUB_NAME, HUB_CONFIGURATION, split="train")
    return [checked_problem(row, f"{HUB_NAME}, row {number}") for number, row in enumerate(rows)]


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


def train(recipe: Recipe) -> None:
    """Train with GRPO. An instruct model needs no warm start."""
    problems = problems_of(recipe)
    model, tokenizer = load_policy(recipe)
    dataset = questions(problems, chat=tokenizer.chat_template is not None)
    train_grpo(recipe, model, tokenizer, dataset, [correct_answer, answer_format])
