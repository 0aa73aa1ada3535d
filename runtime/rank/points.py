"""The points at which features take part in a rank.

In this order: `script_begins` before the script's first line, called by `hooks/attach.py`; for each trainer
`check_trainer`, and `rollouts` once before training; `call` for each call, once before training. What
`rollouts` adds is called around every rollout by `hooks/_rollout_hooks.py`, which has the order of all calls,
and what `call` adds at each step by `step/events.py`. Plain data, and methods that do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.patches import Handler

Step = Callable[[int], None]
"""Takes the number of an optimizer step, from 1."""


@dataclass(kw_only=True)
class CallPoints:
    """One `train()` call or loop, and what features add to it.

    Attributes:
        train_call: number of the call in the run.
        trainer: of a `train()` call; None for a loop.
        hooks: closed when the call ends.
        forward_passes: called before each forward pass of the trainer's model with its keyword arguments,
            unless it is compiled.
        step_ends: called when the optimizer has taken a step, before the ranks vote on it.
        votes_begin: called when the ranks have begun to vote on a step, for what may take longer.
    """

    train_call: int
    trainer: Any
    hooks: ExitStack
    forward_passes: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    step_ends: list[Step] = field(default_factory=list)
    votes_begin: list[Step] = field(default_factory=list)


RowReasons = Callable[[], Sequence[str] | None]
"""Says why each row of this rank's last rollout leaves, "" for one that stays; None if no row of any rank
can.
"""


@dataclass(kw_only=True)
class RolloutPoints:
    """What features add to the rollouts of one trainer.

    Attributes:
        facts: of the trainer.
        inputs: called around everything that is done for a rollout; they get the rows of the data set, and
            may pass on others.
        turns: called around each turn of generation, inside the caps.
        leaving: why rows are left out of baseline and loss. The words are labels in the metrics.
    """

    facts: TrainerFacts = field(default_factory=functools.partial(TrainerFacts.of, None, 1))
    inputs: list[Handler] = field(default_factory=list)
    turns: list[Handler] = field(default_factory=list)
    leaving: list[RowReasons] = field(default_factory=list)

    def row_reasons(self) -> Sequence[str] | None:
        """Return the first reason of each row."""
        found = [reasons for one in self.leaving if (reasons := one()) is not None]
        return [next(filter(None, row), "") for row in zip(*found, strict=True)] if found else None


class RankFeature:
    """A feature in one rank. It overrides the points at which it takes part; the others do nothing."""

    name: ClassVar[str]
    """Under which its settings are in `RankSettings.features`."""

    def script_begins(self, session: Session) -> None:
        """Watch what the script imports. Neither torch nor transformers may be imported yet."""

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Check a trainer that is about to train, or that the script asks to check.

        Raises:
            ConfigError: a setting of the feature is not in effect.
        """

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Add to the rollouts of a trainer that is about to train.

        Args:
            train_call: number of the call in the run.
        """

    def call(self, session: Session, points: CallPoints) -> None:
        """Add to a call that is about to train; its state is not loaded yet."""
