"""Reward functions whose results are checked while TRL computes rewards.

Called by `attach.py` around TRL's method, so that functions which the script calls itself are as they were. A wrapper keeps the
function's kind (coroutine or not) and passes its arguments on. Reward models are left alone: what they return is checked in
the gathered table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grpo_run.runtime.rollouts.exclusions import Reason
from grpo_run.trainers.async_functions import is_coroutine_function
from grpo_run.trainers.exclusion.outputs import check, failed
from grpo_run.trainers.exclusion.repeated_steps import FailedReward, completion_checksum
from grpo_run.trainers.upstream.rollout_names import COMPLETION_IDS

FailedBefore = Callable[[Sequence[Sequence[int]]], Mapping[int, Reason]]
"""Returns the rewards that failed before, by row, for the tokens of the completions."""


class RowFaults:
    """Why rewards of this rank are not valid, by row and column, and which completions they are of."""

    def __init__(self) -> None:
        self._failed: dict[tuple[int, int], FailedReward] = {}
        self.returned: dict[int, tuple[Any, int]] = {}
        """What each function returned, and for how many completions, by column."""

    def note(
        self, column: int, reasons: Mapping[int, Reason], completion_ids: Sequence[Sequence[int]]
    ) -> None:
        """Note the faults of one function, by row."""
        for row, reason in reasons.items():
            self._failed[row, column] = FailedReward(reason, completion_checksum(completion_ids[row]))

    def of(self, row: int, column: int) -> FailedReward | None:
        """Return what is known of one reward; None if it comes from a model."""
        return self._failed.get((row, column))


def is_model(function: Any) -> bool:
    """Whether TRL calls a reward function as a model: it is a torch module."""
    return isinstance(function, torch.nn.Module)


def checked(
    function: Callable[..., Any],
    column: int,
    faults: RowFaults,
    failed_before: FailedBefore = lambda completion_ids: {},
) -> Callable[..., Any]:
    """Return the function with its result checked; a reward model is returned unchanged.

    Args:
        column: of the function in TRL's table.
        faults: receives the reasons of rewards that are not valid.
        failed_before: returns the rewards that failed when the same completions were scored before, by row.
    """
    if is_model(function):
        return function

    def examine(returned: Any, arguments: Mapping[str, Any]) -> Any:
        completion_ids = arguments[COMPLETION_IDS]
        values, reasons = check(returned, len(completion_ids))
        faults.returned[column] = returned, len(completion_ids)
        for row, reason in failed_before(completion_ids).items():
            if row not in reasons:
                values = list(values)
                values[row], reasons[row] = failed(reason), reason
        faults.note(column, reasons, completion_ids)
        return values

    if is_coroutine_function(function):

        async def examined_async(*args: Any, **kwargs: Any) -> Any:
            return examine(await function(*args, **kwargs), kwargs)

        return functools.update_wrapper(examined_async, function)

    def examined(*args: Any, **kwargs: Any) -> Any:
        return examine(function(*args, **kwargs), kwargs)

    return functools.update_wrapper(examined, function)
