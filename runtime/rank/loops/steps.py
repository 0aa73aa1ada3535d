"""The iterator and the object that a script's loop uses, and a plain loop outside `grpo-run launch`.

`Steps` serves loops over a number of steps, `Run` loops over `while`; `trainers/loop.py` makes both around
the loop in `run.py`. `PlainLoop` counts the same steps, and saves and resumes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

from typing_extensions import Self

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.rank.loops._optimizers import OptimizerSteps
from grpo_run.runtime.rank.loops.data_position import DataPosition
from grpo_run.runtime.rank.loops.run import SupervisedLoop


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

    leave = abandon

    def pause(self) -> None:
        """Do nothing."""

    def go_on(self) -> None:
        """Do nothing."""


Item_co = TypeVar("Item_co", covariant=True)


class Steps(Iterator[Item_co], Generic[Item_co]):
    """The steps that are left, like `range`; with data, pairs of step and batch. See `loop.steps`."""

    def __init__(self, run: SupervisedLoop | PlainLoop, total: int, data: DataPosition | None) -> None:
        self._run = run
        self._total = total
        self._data = data
        self._in_step = False

    def __iter__(self) -> _Iteration[Item_co]:
        # an object of its own: a `for` discards it, also if the script has a name for the steps
        return _Iteration(self)

    def __next__(self) -> Item_co:
        """Finish the step in progress and begin the next one. Collective."""
        run = self._run
        run.go_on()
        if self._in_step:
            self._in_step = False
            run.commit()
        if run.ended:
            run.restore_randomness()
            raise StopIteration
        batch = None
        if self._data is not None:
            batch = self._data.next(run.restore_randomness)
        run.restore_randomness()
        run.begin_step()
        self._in_step = True
        return run.step if self._data is None else (run.step, batch)  # type: ignore[return-value]

    def __len__(self) -> int:
        """Return how many steps are left, the one in progress included."""
        return 0 if self._run.ended else self._total - self._run.step

    def end(self) -> None:
        """Finish the step in progress and end the loop: no further step is yielded. Collective.

        `break` instead leaves the step in progress without a vote.
        """
        self._run.go_on()
        if self._in_step:
            self._in_step = False
            self._run.commit()
        self._run.end()

    def _pause(self) -> None:
        """The script has left a `for` over the steps. Not collective."""
        if self._in_step:
            self._run.pause()

    def __del__(self) -> None:
        # after an exception, too: what the script does next is not a step
        if self._in_step:
            self._run.leave()


class _Iteration(Iterator[Item_co]):
    """One `for` over the steps of a loop."""

    def __init__(self, steps: Steps[Item_co]) -> None:
        self._steps = steps

    def __next__(self) -> Item_co:
        return next(self._steps)

    def __del__(self) -> None:
        self._steps._pause()


class Run:
    """A loop over `while`. See `loop.begin`."""

    def __init__(self, run: SupervisedLoop | PlainLoop) -> None:
        self._run = run
        run.restore_randomness()
        if not run.ended:
            run.begin_step()

    @property
    def step(self) -> int:
        """The step that is next, counted from 0: how many are finished."""
        return self._run.step

    @property
    def ended(self) -> bool:
        """Whether the loop takes no further step."""
        return self._run.ended

    def commit(self, step: int | None = None) -> None:
        """Finish a step: vote on it, and save what is due. Collective.

        Args:
            step: its number, counted from 0, to check that the script and the run count alike.

        Raises:
            ConfigError: it is not `step`, or the loop has ended.
            Stopped: all ranks have agreed to stop.
        """
        if self._run.ended:
            raise ConfigError(f"commit() after the end of a loop, whose last step was {self._run.step - 1}")
        if step is not None and step != self._run.step:
            raise ConfigError(
                f"commit({step}), but the step in progress is {self._run.step}: steps count from 0, without"
                " gaps; start from run.step"
            )
        self._run.commit()
        if not self._run.ended:
            self._run.begin_step()

    def end(self) -> None:
        """End the loop and save it. Collective. A second call does nothing.

        A step that was not committed counts if an optimizer has taken a step in it.
        """
        self._run.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the loop. An exception leaves it where it is: the script may go on with another one."""
        if kind is None:
            self.end()
        else:
            self._run.abandon()
