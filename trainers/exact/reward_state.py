"""Save and restore stateful reward functions: those with `state_dict` and `load_state_dict`.

Looks through wrappers, including the guard's own. Skips reward models: every `torch.nn.Module` has a state,
but training does not change theirs. Called by `state.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo_run.trainers.exact.encoding import Decoder, Encoder, is_stateful
from grpo_run.trainers.exact.format import RewardState

MAX_WRAPPERS = 100
"""Wrappers around a function; more would be a cycle."""


def stateful_rewards(trainer: Any) -> list[tuple[str, Any]]:
    """Return name and object of each stateful reward function, in order."""
    found = []
    functions = getattr(trainer, "reward_funcs", None)
    for function in functions if isinstance(functions, list) else []:
        inner, wrappers = function, 0
        while not is_stateful(inner) and hasattr(inner, "__wrapped__") and wrappers < MAX_WRAPPERS:
            inner, wrappers = inner.__wrapped__, wrappers + 1
        if is_stateful(inner) and not isinstance(inner, torch.nn.Module):
            found.append((getattr(function, "__name__", type(inner).__name__), inner))
    return found


def save(trainer: Any, encoder: Encoder) -> list[RewardState]:
    """Return the encoded states."""
    return [
        RewardState(name=name, state=encoder(function.state_dict(), f"the state of reward {name}"))
        for name, function in stateful_rewards(trainer)
    ]


def load(trainer: Any, saved: Sequence[RewardState], decoder: Decoder) -> str | None:
    """Load the states into the script's reward functions.

    Returns:
        None, or a warning if the script's functions are not those that were saved; then nothing is loaded.
    """
    functions = stateful_rewards(trainer)
    saved_names, names = [reward.name for reward in saved], [name for name, _ in functions]
    if saved_names != names:
        return (
            f"the checkpoint contains states of the reward functions {saved_names}, but the script has"
            f" {names}: their states are not restored"
        )
    for (_, function), reward in zip(functions, saved, strict=True):
        if reward.state is not None:
            function.load_state_dict(decoder(reward.state))
    return None
