"""A loop outside `grpo-run launch`: it counts the steps that `run.py` would count, and does nothing else.

Made by `trainers/loop.py` for `steps.py`. Saves and resumes nothing.
"""

from __future__ import annotations

from types import FrameType

from grpo_run.trainers.loops.optimizers import OptimizerSteps


class PlainLoop:
    """A loop that counts.

    Args:
        total: how many steps the loop takes; None if not known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._optimizers = OptimizerSteps((), before=lambda: None, after=lambda: None)
        self.step = 0
        self.ended = total is not None and total <= 0
        if not self.ended:
            self._optimizers.install()

    def restore_randomness(self) -> None:
        """Do nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def commit(self) -> None:
        """Count the step."""
        self._optimizers.take_pending()
        self.step += 1
        if self._total is not None and self.step >= self._total:
            self._end()

    def end(self) -> None:
        """End the loop. The step in progress counts if an optimizer has taken a step in it."""
        if not self.ended:
            self.step += int(self._optimizers.taken)
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._optimizers.remove()

    def abandon(self) -> None:
        """Observe the optimizers no more."""
        self._optimizers.remove()

    def leave(self) -> None:
        """Observe the optimizers no more."""
        self._optimizers.remove()

    def pause(self, frame: FrameType | None, *, on_purpose: bool) -> None:
        """Do nothing."""

    def go_on(self) -> None:
        """Do nothing."""
