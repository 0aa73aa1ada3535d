"""What a replay does otherwise than the run: samples that leave the loss, and other reward functions.

Made by `rank.py` for a replay with `--drop-sample` or `--reward-file`. Samples leave as those of other
features do, by a point of the rollout. From the step on that the settings name; evaluations stay as they are.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Sequence
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.replay.settings import ReplaySettings
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.async_functions import is_coroutine_function


class Changes:
    """The changes of one trainer's rollouts.

    Args:
        rows: returns the numbers of this rank's samples in the rollout in progress.

    Raises:
        ConfigError: the trainer cannot leave samples out, or the file has no function for it.
    """

    def __init__(
        self, trainer: Any, facts: TrainerFacts, replay: ReplaySettings, rows: Callable[[], Sequence[int]]
    ) -> None:
        self._trainer, self._replay, self._rows = trainer, replay, rows
        self._functions: dict[str, Any] = {}
        if replay.dropped and not (facts.has_rollouts and facts.rows_can_leave):
            raise ConfigError("--drop-sample: the trainer, or its release of TRL, cannot leave samples out")
        if replay.reward_file:
            self._functions = _functions(replay.reward_file, getattr(trainer, "reward_func_names", ()))

    def row_reasons(self) -> list[str] | None:
        """Say which rows of the rollout leave; None if none of any rank can."""
        if not (self._replay.dropped and self._applies):
            return None
        return ["left out" if number in self._replay.dropped else "" for number in self._rows()]

    def replaced(self, function: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a reward function."""
        if (other := self._functions.get(name)) is None:
            return call

        def score(*args: Any, **kwargs: Any) -> Any:
            return (other if self._applies else call)(*args, **kwargs)

        async def score_async(*args: Any, **kwargs: Any) -> Any:
            result = score(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        return score_async if is_coroutine_function(function) else score

    @property
    def _applies(self) -> bool:
        model, state = self._trainer.model, self._trainer.state
        return bool(model.training and state.global_step + 1 >= self._replay.changes_from)


def _functions(file: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the functions of a file that have the name of a reward function."""
    try:
        found = runpy.run_path(file)
    except Exception as error:  # whatever the file does
        raise ConfigError(f"--reward-file {file}: {type(error).__name__}: {error}") from error
    functions = {name: found[name] for name in names if callable(found.get(name))}
    if not functions:
        raise ConfigError(f"--reward-file {file}: defines no reward function of the run ({', '.join(names)})")
    return functions
