"""The state of reward functions that remember: those that offer `state_dict` and `load_state_dict`.

Looked for under wrappers, the guard's own included. Reward models offer a state too, as every module does; they do not
change and are left out. Called by `state.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_run.trainers.exact.format import RewardState

DEEPEST = 100
"""Wrappers around a function; more would be a ring."""


def stateful_rewards(trainer: Any) -> list[tuple[str, Any]]:
    """The reward functions that offer their state, by name, in order; reward models do not change and are left out."""
    found = []
    functions = getattr(trainer, "reward_funcs", None)
    for function in functions if isinstance(functions, list) else []:
        inner, seen = function, 0
        while not _offers_state(inner) and hasattr(inner, "__wrapped__") and seen < DEEPEST:
            inner, seen = inner.__wrapped__, seen + 1
        if _offers_state(inner) and not isinstance(inner, torch.nn.Module):
            found.append((getattr(function, "__name__", type(inner).__name__), inner))
    return found


def _offers_state(function: Any) -> bool:
    return callable(getattr(function, "state_dict", None)) and callable(
        getattr(function, "load_state_dict", None)
    )


def save(trainer: Any, encoded: Callable[[Any, str], Any]) -> list[RewardState]:
    """The states, in tagged form.

    Args:
        encoded: the tagged form of a value of that description, None where it has none.
    """
    return [
        RewardState(name=name, state=encoded(function.state_dict(), f"the state of reward {name}"))
        for name, function in stateful_rewards(trainer)
    ]


def load(trainer: Any, saved: Sequence[RewardState], decoded: Callable[[Any], Any]) -> str | None:
    """Put the states back.

    Returns:
        What to say when the script's functions are not those that were saved: then nothing is put back.
    """
    functions = stateful_rewards(trainer)
    theirs, ours = [reward.name for reward in saved], [name for name, _ in functions]
    if theirs != ours:
        return (
            f"the checkpoint holds states of the reward functions {theirs}, the script now has {ours}: they begin"
            " without"
        )
    for (_, function), reward in zip(functions, saved, strict=True):
        if reward.state is not None:
            function.load_state_dict(decoded(reward.state))
    return None
