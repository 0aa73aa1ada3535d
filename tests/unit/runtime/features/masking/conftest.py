"""Fixtures: real GRPO and RLOO trainers on a tiny model, one of each for a whole module, with completions
that are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny_trainers import tiny_trainer

GENERATIONS = 4
PROMPTS = ["ab12cd", "xy34zw"]
COMPLETIONS = [
    [7, 9, 1], [5, 6, 8, 11, 1], [12, 1], [20, 21, 22, 23],
    [9, 9, 9, 1], [30, 1], [14, 15, 16, 17, 18, 1], [3, 4, 1],
]  # fmt: skip
"""Tokens of the completions of both prompts; 1 is EOS."""


def _trainer(kind: str, folder: Path) -> Any:
    # TRL makes the loop of async functions only for a trainer that has one
    made = tiny_trainer(kind, folder, num_generations=GENERATIONS, reward_funcs=[no_reward])
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


@pytest.fixture(scope="module")
def _grpo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _trainer("GRPO", tmp_path_factory.mktemp("grpo"))


@pytest.fixture(scope="module")
def _rloo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _trainer("RLOO", tmp_path_factory.mktemp("rloo"))


@contextmanager
def _fresh(trainer: Any) -> Iterator[Any]:
    """A trainer without what an earlier test has changed."""
    before = dict(vars(trainer))
    for name in ("_metrics", "_logs", "_pending_extra_logs", "_pending_metrics"):
        setattr(trainer, name, _emptied(getattr(trainer, name)))
    try:
        yield trainer
    finally:
        for name in vars(trainer).keys() - before.keys():
            delattr(trainer, name)
        vars(trainer).update(before)
        trainer.model.zero_grad()


def _emptied(table: Any) -> Any:
    if isinstance(table, defaultdict):
        return defaultdict(table.default_factory)
    return {key: type(value)(getattr(value, "default_factory", None) or ()) for key, value in table.items()}


def _given(trainer: Any) -> Any:
    """Make the trainer generate the completions above."""
    texts = trainer.processing_class.batch_decode(COMPLETIONS, skip_special_tokens=True)
    prompt_ids = [
        trainer.processing_class(prompt)["input_ids"] for prompt in PROMPTS for _ in range(GENERATIONS)
    ]
    grpo = (prompt_ids, COMPLETIONS, None, texts, None, {}, None, [])
    trainer._generate = lambda prompts: (
        grpo if hasattr(trainer, "loss_type") else (prompt_ids, COMPLETIONS, texts)
    )
    return trainer


@pytest.fixture
def grpo(_grpo: Any) -> Iterator[Any]:
    """A GRPO trainer."""
    with _fresh(_grpo) as trainer:
        yield _given(trainer)


@pytest.fixture
def rloo(_rloo: Any) -> Iterator[Any]:
    """An RLOO trainer."""
    with _fresh(_rloo) as trainer:
        yield _given(trainer)


@pytest.fixture(params=["grpo", "rloo"])
def either(request: pytest.FixtureRequest) -> Any:
    """A GRPO trainer, and an RLOO trainer."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def rollout() -> Callable[..., Any]:
    """Score the given completions with the given rewards, with masking attached, and return what TRL
    returns.
    """

    def score(trainer: Any, session: Any, *columns: Any, leaving: Any = None) -> Any:
        import torch
        from support.wrapped import with_feature

        from grpo_run.runtime.features.masking.rank import PART

        functions = [column if callable(column) else returning(column) for column in columns]
        trainer.reward_funcs = functions
        trainer.reward_func_names = [f"reward_{index}" for index in range(len(functions))]
        trainer.reward_processing_classes = [None] * len(functions)
        trainer.reward_weights = torch.ones(len(functions))
        with with_feature(PART, trainer, session, leaving=[lambda: leaving]):
            return trainer._generate_and_score_completions(
                [{"prompt": prompt} for prompt in PROMPTS for _ in range(GENERATIONS)]
            )

    return score


async def no_reward(completions: list[str], **_: Any) -> list[float]:
    """A reward function that is never called."""
    raise AssertionError


def returning(values: list[Any]) -> Callable[..., Any]:
    """A reward function that returns these values."""

    def function(completions: list[str], **_: Any) -> list[Any]:
        assert len(completions) == len(COMPLETIONS)
        return list(values)

    return function


@pytest.fixture
def completions() -> SimpleNamespace:
    """The given completions: tokens, prompts, and samples of a group."""
    return SimpleNamespace(tokens=COMPLETIONS, prompts=PROMPTS, generations=GENERATIONS)
