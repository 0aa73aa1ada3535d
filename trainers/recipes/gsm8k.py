"""GSM8K, grade-school mathematics in words, with verifiable rewards: the number must be right, and be found.

Called by `__main__.py`; settings come from `gsm8k.yaml`. Without `data` the problems come from the hub
(`openai/gsm8k`, configuration `main`); with it, from local JSON lines.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_dataset

from grpo_run.trainers.recipes.problems import Problem, checked_problem, read_problems
from grpo_run.trainers.recipes.recipe import Recipe
from grpo_run.trainers.recipes.rewards import answer_format, correct_answer
from grpo_run.trainers.recipes.training import load_policy, reinforce

HUB_NAME, HUB_CONFIGURATION = "openai/gsm8k", "main"
INSTRUCTION = "Solve the problem step by step. End with a line that holds only the final number, in the form '#### number'."


def problems_of(recipe: Recipe) -> list[Problem]:
    """The training problems: the recipe's `data`, or the hub's."""
    if recipe.data is not None:
        return read_problems(recipe.data)
    rows = load_dataset(HUB_NAME, HUB_CONFIGURATION, split="train")
    return [checked_problem(row, f"{HUB_NAME}, row {number}") for number, row in enumerate(rows)]


def prompt_for(question: str, *, chat: bool) -> Any:
    """A conversation for a tokenizer that has a chat template, else plain text."""
    if chat:
        return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return f"{INSTRUCTION}\n\nProblem: {question}\nSolution:"


def questions(problems: list[Problem], *, chat: bool) -> Dataset:
    """Columns `prompt` and `answer`, the latter as text, since it must stay exact."""
    return Dataset.from_dict(
        {
            "prompt": [prompt_for(problem.question, chat=chat) for problem in problems],
            "answer": [str(problem.answer) for problem in problems],
        }
    )


def train(recipe: Recipe) -> None:
    """GRPO; an instruct model needs no warm start."""
    problems = problems_of(recipe)
    model, tokenizer = load_policy(recipe)
    dataset = questions(problems, chat=tokenizer.chat_template is not None)
    reinforce(recipe, model, tokenizer, dataset, [correct_answer, answer_format])
