"""The points at which features take part in a rank.

In this order: `script_begins` before the script's first line, called by `hooks/attach.py`; for each trainer
`check_trainer`, and `rollouts` once before training; `call` for each call, once before training. What
`rollouts` adds is called around every rollout by `hooks/_rollout_hooks.py`, which has the order of all calls,
and what `call` adds at each step by `step/events.py`. Plain data, and methods that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.patches import Handler
from grpo_run.watchdog.observation import Alarm

Step = Callable[[int], None]
"""Takes the number of an optimizer step, from 1."""


class HasState(Protocol):
    """Something that a checkpoint holds, as plain JSON values by keys of its own."""

    def state(self) -> Mapping[str, Any]:
        """Return the state."""

    def load(self, state: Mapping[str, Any], /) -> None:
        """Restore what `state` returned; keys may be missing, and others present."""


@dataclass(kw_only=True)
class CallPoints:
    """One `train()` call or loop, and what features add to it.

    Attributes:
        train_call: number of the call in the run.
        trainer: of a `train()` call; None for a loop.
        facts: of the trainer.
        hooks: closed when the call ends.
        step_begins: called when the batches of a step have been read, and the random generators are set.
        forward_passes: called before each forward pass of the trainer's model with its keyword arguments,
            unless it is compiled.
        logged: called with the known numbers that the script logs of a step of a loop.
        step_ends: called when the optimizer has taken a step, before the ranks vote on it.
        votes_begin: called when the ranks have begun to vote on a step, for what may take longer.
        optimized: whether an optimizer has taken a step in the loop's step that ends.
        alarm: set by a feature at the end of a step to end the attempt: the ranks agree on it in the vote
            of the step, and all leave before the next optimizer step and before any save.
        states: what a checkpoint of the call holds of features.
    """

    train_call: int
    trainer: Any = None
    facts: TrainerFacts | None = None
    hooks: ExitStack
    step_begins: list[Step] = field(default_factory=list)
    forward_passes: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    logged: list[Callable[[Mapping[str, float]], None]] = field(default_factory=list)
    step_ends: list[Step] = field(default_factory=list)
    votes_begin: list[Step] = field(default_factory=list)
    optimized: bool = True
    alarm: Alarm | None = None
    states: list[HasState] = field(default_factory=list)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of features."""
        return {key: value for one in self.states for key, value in one.state().items()}

    def load(self, state: Any) -> None:
        """Restore what `state` returned; nothing from a checkpoint that has none."""
        if isinstance(state, dict):
            for one in self.states:
                one.load(state)


RowReasons = Callable[[], Sequence[str] | None]
"""Says why each row of this rank's last rollout leaves, "" for one that stays; None if no row of any rank
can.
"""


@dataclass(kw_only=True)
class RolloutPoints:
    """What features add to the rollouts of one trainer.

    Attributes:
        inputs: called around everything that is done for a rollout; they get the rows of the data set, and
            may pass on others.
        turns: called around each turn of generation, inside the caps.
        leaving: why rows are left out of baseline and loss. The words are labels in the metrics.
    """

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
