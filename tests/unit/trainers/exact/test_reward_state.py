"""Reward functions that remember go on remembering; what cannot be kept is said once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.exact import Begun, Trainer

from grpo_run.trainers.exact.reward_state import stateful_rewards


class Stateful:
    """A reward that remembers."""

    def __init__(self) -> None:
        self.state: Any = {"seen": 0, "mean": torch.zeros(2), "scale": math.nan}

    def __call__(self, **_: Any) -> list[float]:
        return []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def wrapped(function: Any) -> Any:
    """As the guard wraps it."""

    def marked(**keywords: Any) -> Any:
        return function(**keywords)

    functools.update_wrapper(marked, function)
    marked.__name__ = getattr(function, "__name__", type(function).__name__)
    return marked


def test_a_stateful_rewards_state_survives(again: Callable[..., Any]) -> None:
    """Seen through wrappers; functions without a state do not matter."""
    there, here = Stateful(), Stateful()
    there.state = {"seen": 9, "mean": torch.ones(2), "scale": math.inf}
    again(
        Trainer(reward_funcs=[len, wrapped(wrapped(there))]), fresh=Trainer(reward_funcs=[len, wrapped(here)])
    )
    assert (here.state["seen"], here.state["mean"].tolist(), here.state["scale"]) == (9, [1, 1], math.inf)


def test_a_reward_state_that_cannot_be_kept_is_said_once(
    begin: Begun, warned: list[str], tmp_path: Path
) -> None:
    """Naming the function; the run goes on."""
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


def test_other_reward_functions_than_saved_begin_anew(again: Callable[..., Any], warned: list[str]) -> None:
    """A script may have been changed; it is said."""
    fresh = Stateful()
    again(Trainer(), fresh=Trainer(reward_funcs=[fresh]))
    assert fresh.state["seen"] == 0
    assert "they begin without" in warned[0]


def test_reward_models_are_left_out() -> None:
    """They offer a state as every module does, and do not change."""
    assert stateful_rewards(SimpleNamespace(reward_funcs=[torch.nn.Linear(1, 1)])) == []
    assert stateful_rewards(SimpleNamespace()) == []
