"""Stateful reward functions keep their state; a state that cannot be saved is warned about once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.exact import Begun, Trainer

from grpo_run.runtime.rank.exact._trainer_state import stateful_rewards


class Stateful:
    """A stateful reward function."""

    def __init__(self) -> None:
        self.state: Any = {"seen": 0, "mean": torch.zeros(2), "scale": math.nan}

    def __call__(self, **_: Any) -> list[float]:
        return []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def wrapped(function: Any) -> Any:
    """Wrap a reward function like the guard does."""

    def marked(**keywords: Any) -> Any:
        return function(**keywords)

    functools.update_wrapper(marked, function)
    marked.__name__ = getattr(function, "__name__", type(function).__name__)
    return marked


def test_the_state_of_a_reward_function_is_restored(again: Callable[..., Any]) -> None:
    """Wrappers are looked through; stateless functions are ignored."""
    saved, restored = Stateful(), Stateful()
    saved.state = {"seen": 9, "mean": torch.ones(2), "scale": math.inf}
    again(
        Trainer(reward_funcs=[len, wrapped(wrapped(saved))]),
        fresh=Trainer(reward_funcs=[len, wrapped(restored)]),
    )
    assert (restored.state["seen"], restored.state["mean"].tolist(), restored.state["scale"]) == (
        9,
        [1, 1],
        math.inf,
    )


def test_a_reward_state_that_cannot_be_encoded_is_warned_about_once(
    begin: Begun, warned: list[str], tmp_path: Path
) -> None:
    """The warning names the function; saving and resuming succeed without its state."""
    reward = Stateful()
    reward.state = {"client": object()}
    state = begin(Trainer(reward_funcs=[reward]))
    state.save(tmp_path)
    state.save(tmp_path)
    assert len(warned) == 1
    assert "the state of reward Stateful" in warned[0]
    fresh = Stateful()
    begin(Trainer(reward_funcs=[fresh]), tmp_path)
    assert fresh.state["seen"] == 0


def test_other_reward_functions_than_saved_start_without_state(
    again: Callable[..., Any], warned: list[str]
) -> None:
    """A changed script gets a warning."""
    fresh = Stateful()
    again(Trainer(), fresh=Trainer(reward_funcs=[fresh]))
    assert fresh.state["seen"] == 0
    assert "their states are not restored" in warned[0]


def test_reward_models_are_skipped() -> None:
    """Every module has a state dict, but training does not change reward models."""
    assert stateful_rewards(SimpleNamespace(reward_funcs=[torch.nn.Linear(1, 1)])) == []
    assert stateful_rewards(SimpleNamespace()) == []
