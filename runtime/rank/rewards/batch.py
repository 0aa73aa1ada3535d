"""The arguments of one reward call by sample, split for workers and joined, and the `whole_batch` mark.

`RewardBatch` gives parts of a call's arguments to a worker and puts the results together; `_service.py` uses
it. `whole_batch` marks a reward function that must not be called with a part of a batch; scripts import it
from `trainers/rewards.py`. Calls no reward function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from grpo_run.runtime.rank.rewards._messages import Reply
from grpo_run.runtime.rank.rewards._worker import NOT_COLUMNS, RECORDED


class RewardBatch:
    """The arguments of one call, by sample."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._functions = {name: self._arguments.pop(name) for name in RECORDED if name in arguments}
        state: Any = self._arguments.get("trainer_state")
        if hasattr(state, "log_history"):
            state = copy.copy(state)  # it grows with the run
            state.log_history = []
            self._arguments["trainer_state"] = state
        self.prompts = arguments["prompts"]
        self.completions = arguments["completions"]
        self.size = len(self.prompts)
        self.all = range(self.size)

    def arguments(self, part: range) -> dict[str, Any]:
        """Return the keyword arguments for a part of the batch; those that are recorded are None."""
        chosen = {
            name: value[part.start : part.stop]
            if name not in NOT_COLUMNS and isinstance(value, (list, tuple)) and len(value) == self.size
            else value
            for name, value in self._arguments.items()
        }
        return chosen | dict.fromkeys(self._functions)

    def replay(self, passed: list[tuple[range, Reply]]) -> None:
        """Make the recorded calls. Columns of parts are joined, with None for samples that failed."""
        whole = len(passed) == 1 and len(passed[0][0]) == self.size
        columns: dict[str, list[Any]] = {}
        for part, reply in passed:
            extra: dict[str, list[Any]] = {}
            for name, args, kwargs in reply.records:
                if name == "log_extra" and not whole:
                    column, values = _column(*args, **kwargs)
                    extra.setdefault(column, []).extend(values)
                else:
                    self._functions[name](*args, **kwargs)
            for column, values in extra.items():
                joined = columns.setdefault(column, [None] * self.size)
                if len(values) == len(part):
                    joined[part.start : part.stop] = values
        for column, values in columns.items():
            self._functions["log_extra"](column, values)


def _column(column: str, values: list[Any]) -> tuple[str, list[Any]]:
    """The arguments of TRL's `log_extra`."""
    return column, list(values)


Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "__grpo_run_whole_batch__"


def whole_batch(function: Function) -> Function:
    """Mark a reward function that compares the completions of a batch with one another.

    After a failure, a function is called again with parts of its batch, to find the samples that it fails on.
    Parts of a batch would change the rewards of such a function; all samples of the failed call are excluded
    instead.

    Args:
        function: a reward function as TRL calls it. Returned itself; the mark has no effect outside the
            reward service.
    """
    setattr(function, _MARK, True)
    return function


def needs_whole_batch(function: object) -> bool:
    """Whether a reward function is marked with `whole_batch`."""
    return bool(getattr(function, _MARK, False))
