"""What a script logs of the steps of its loop, by `loop.log`.

Made by `run.py` for the loop that is running, and kept in the guard, where `trainers/loop.py` finds it. What becomes of the
numbers is in `calls/logged.py`, and what the learning guards judge of them in `learning/`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.trainers.calls.logged import LOGGED_METRICS, known_metrics, publish_metrics
from grpo_run.trainers.rank.session import Session
from grpo_run.watchdog.learning.observations import StepValues

PREFIX = "train/"
"""Under which many scripts log what is not of an evaluation."""
NAMES = frozenset(name for names in LOGGED_METRICS.values() for name in names)


class LoopLogs:
    """Takes what the script logs of one loop.

    Args:
        train_call: number of the loop among the calls of the run.
        step: returns the step in progress, counted from 1.
    """

    def __init__(self, session: Session, *, train_call: int, step: Callable[[], int]) -> None:
        self._session = session
        self._train_call = train_call
        self._step = step
        self._finite = True
        self._reward: float | None = None

    def __call__(self, values: Mapping[str, Any]) -> None:
        """Publish the numbers that are known. Not collective."""
        if threading.current_thread() is not threading.main_thread():
            return  # only one thread writes the slot
        metrics = known_metrics(_numbers(values))
        self._finite &= math.isfinite(metrics.get("loss", 0.0))
        self._reward = metrics.get("reward", self._reward)
        publish_metrics(self._session, metrics, step=self._step(), train_call=self._train_call)

    def take(self, *, optimized: bool) -> StepValues:
        """Return what the finished step has shown of the learning, and begin the next one.

        Args:
            optimized: an optimizer has taken a step in it. Otherwise its weights have not changed: a gradient scaler
                skips a step whose gradients are not finite.
        """
        finite, reward = self._finite, self._reward
        self._finite, self._reward = True, None
        # ranks log rewards of their own, and one rank must judge for all
        return StepValues(finite=finite or not optimized, reward=reward if self._session.is_main else None)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries with known names that are numbers, also those in tensors and arrays of one element."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = key.removeprefix(PREFIX) if isinstance(key, str) else ""
        if name not in NAMES or isinstance(value, (bool, str)):
            continue
        try:
            found[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError):  # a histogram, or a tensor of several elements
            continue
    return found
