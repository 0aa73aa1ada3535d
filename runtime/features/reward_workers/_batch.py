"""The arguments of one reward call by sample, split for workers and joined.

`RewardBatch` gives parts of a call's arguments to a worker and puts the results together; `_service.py` uses
it. Calls no reward function.
"""

from __future__ import annotations

import copy
from typing import Any

from grpo_run.runtime.features.reward_workers._messages import Reply
from grpo_run.runtime.features.reward_workers._worker import NOT_COLUMNS, RECORDED


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
