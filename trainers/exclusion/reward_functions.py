"""Reward functions whose results are checked while TRL computes rewards.

Called by `attach.py` around TRL's method, so that functions which the script calls itself are as they were. A wrapper keeps the
function's kind (coroutine or not) and passes its arguments on. Reward models are left alone: what they return is checked in
the gathered table.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from grpo_run.runtime.rollouts.exclusions import Reason
from grpo_run.trainers.exclusion.outputs import check
from grpo_run.trainers.upstream.rollout_names import REWARD_FUNCTION_ARGUMENT


class RowFaults:
    """Why rewards of this rank are not valid, by row and column. Cleared before each rollout."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[int, int], Reason] = {}

    def clear(self) -> None:
        """Forget the last rollout."""
        self._reasons.clear()

    def note(self, column: int, reasons: dict[int, Reason]) -> None:
        """Note the faults of one function, by row."""
        self._reasons.update({(row, column): reason for row, reason in reasons.items()})

    def reason(self, row: int, column: int, default: Reason) -> Reason:
        """Return the reason of one reward, if it is known."""
        return self._reasons.get((row, column), default)


def is_model(function: Any) -> bool:
    """Whether TRL calls a reward function as a model: it is a torch module."""
    return isinstance(function, torch.nn.Module)


def is_coroutine_function(function: Any) -> bool:
    """Whether TRL awaits a reward function."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def checked(function: Callable[..., Any], column: int, faults: RowFaults) -> Callable[..., Any]:
    """Return the function with its result checked; a reward model is returned unchanged.

    Args:
        column: of the function in TRL's table.
        faults: receives the reasons of rewards that are not valid.
    """
    if is_model(function):
        return function

    def examine(returned: Any, completions: Any) -> Any:
        values, reasons = check(returned, len(completions))
        faults.note(column, reasons)
        return values

    if is_coroutine_function(function):

        async def examined_async(*args: Any, **kwargs: Any) -> Any:
            return examine(await function(*args, **kwargs), kwargs[REWARD_FUNCTION_ARGUMENT])

        return functools.update_wrapper(examined_async, function)

    def examined(*args: Any, **kwargs: Any) -> Any:
        return examine(function(*args, **kwargs), kwargs[REWARD_FUNCTION_ARGUMENT])

    return functools.update_wrapper(examined, function)
