"""The points at which features take part in a rank.

In this order: `fork` first of all; `begin` before the script runs; `call` when a `train()` call or a loop
begins; for each trainer that generates, `rollouts` once before training; `end` when the script is over. What
`rollouts` adds is called around every rollout by `hooks/_rollout_hooks.py`, which has the order of all calls.
Plain data, and methods that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream.patches import Handler

RowReasons = Callable[[], Sequence[str] | None]
"""Says why each row of this rank's last rollout leaves, "" for one that stays; None if no row of any rank
can.
"""


RewardWrapper = Callable[[Any, str, Callable[..., Any]], Callable[..., Any]]
"""Returns what is called in place of a reward function, from the function, its name, and what calls it in the
rank: that, or something that may call it.
"""


@dataclass(kw_only=True)
class RolloutPoints:
    """What features add to the rollouts of one trainer.

    Attributes:
        inputs: called around everything that is done for a rollout; they get the rows of the data set, and
            may pass on others.
        reward_functions: what is called in place of each reward function, from the inside out.
        leaving: why rows are left out of baseline and loss. The words are labels in the metrics.
    """

    inputs: list[Handler] = field(default_factory=list)
    reward_functions: list[RewardWrapper] = field(default_factory=list)
    leaving: list[RowReasons] = field(default_factory=list)

    def row_reasons(self) -> Sequence[str] | None:
        """Return the first reason of each row."""
        found = [reasons for one in self.leaving if (reasons := one()) is not None]
        return [next(filter(None, row), "") for row in zip(*found, strict=True)] if found else None


Function = TypeVar("Function", bound=Callable[..., Any])
_WHOLE_BATCH = "__grpo_run_whole_batch__"


def whole_batch(function: Function) -> Function:
    """Mark a reward function that compares the completions of a batch with one another.

    After a failure, a function may be called again with parts of its batch, to find the samples that it fails
    on. Parts of a batch would change the rewards of such a function; all samples of the failed call are
    excluded instead.

    Args:
        function: a reward function as TRL calls it. Returned itself; the mark has no other effect.
    """
    setattr(function, _WHOLE_BATCH, True)
    return function


def needs_whole_batch(function: object) -> bool:
    """Whether a reward function is marked with `whole_batch`."""
    return bool(getattr(function, _WHOLE_BATCH, False))


@dataclass(frozen=True, kw_only=True)
class Call:
    """A `train()` call, or a hand-written loop, that begins.

    Attributes:
        models: the torch modules that it trains.
        trainer: whose call it is; None for a loop.
        leave_loop: ends the loop after the present step, on this rank alone; None for a `train()` call.
    """

    models: Iterable[Any]
    trainer: Any = None
    leave_loop: Callable[[], None] | None = None


class RankFeature:
    """A feature in one rank. It overrides the points at which it takes part; the others do nothing."""

    name: ClassVar[str]
    """Under which its settings are in `RankSettings.features`."""

    def fork(self, settings: RankSettings) -> None:
        """Fork what is to have the libraries of this process: it has one thread, and no accelerator."""

    def begin(self, session: Session) -> None:
        """Prepare this rank. Its session is open, and the script has not begun."""

    def call(self, call: Call) -> AbstractContextManager[object]:
        """Return what is entered for the length of a call. Collective: called on every rank before anything
        of the call is hooked, and after the ranks have agreed on where it starts.
        """
        return nullcontext()

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Add to the rollouts of a trainer that is about to train.

        Args:
            train_call: number of the call in the run.
        """

    def end(self) -> None:
        """The script is over; the rank exits next. Called with a time limit."""
