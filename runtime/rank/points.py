"""The points at which features take part in a rank.

In this order: `fork` first of all; `script_begins` before the script's first line, called by
`hooks/attach.py`; for each trainer `check_trainer` and `needs`; `call` for each call, once before training,
and `rollouts` for a trainer that generates; `end` when the script is over. What `rollouts` adds is called
around every rollout by `hooks/_rollout_hooks.py`, which has the order of all calls, and what `call` adds at
each step by `step/events.py`. Plain data, and methods that do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import tensor_files
from grpo_run.runtime.upstream.features import Feature
from grpo_run.runtime.upstream.patches import Handler, noting, wrapped_methods
from grpo_run.watchdog.observation import Alarm, EndReason

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
        models: the torch modules that it trains.
        optimizers: of a loop; those of a trainer are its own.
        leave_loop: ends a loop after the present step, on this rank alone; None for a `train()` call.
        step_begins: called when the batches of a step have been read, and the random generators are set.
        forward_passes: called before each forward pass of the trainer's model with its keyword arguments,
            unless it is compiled.
        losses: called with the raw loss of each micro-batch of a trainer.
        logged: called with the known numbers that the script logs of a step of a loop.
        step_ends: called when the optimizer has taken a step, before the ranks vote on it.
        votes_begin: called when the ranks have begun to vote on a step, for what may take longer.
        steps_over: called when everything of a step is done and logged, before what is due is saved. The vote
            on it may be in progress.
        optimized: whether an optimizer has taken a step in the loop's step that ends.
        norm: what a trainer's clipping of gradients has returned in the present step: see `gradient_norm`.
        alarm: set by a feature at the end of a step to end the attempt: the ranks agree on it in the vote
            of the step, and all leave before the next optimizer step and before any save.
        common: set by a feature at the end of a step: a number that is the same on all ranks if they compute
            alike; 0 for none.
        agreed: the number in the last vote; None if ranks had different ones.
        states: what a checkpoint of the call holds of features.
        keeps_order: a feature sees to it that the data goes on where it was: nothing is warned of it.
    """

    train_call: int
    trainer: Any = None
    facts: TrainerFacts | None = None
    hooks: ExitStack
    models: Iterable[Any] = ()
    optimizers: Iterable[Any] = ()
    leave_loop: Callable[[], None] | None = None
    step_begins: list[Step] = field(default_factory=list)
    forward_passes: list[Callable[[Mapping[str, Any]], None]] = field(default_factory=list)
    losses: list[Callable[[Any], None]] = field(default_factory=list)
    logged: list[Callable[[Mapping[str, float]], None]] = field(default_factory=list)
    step_ends: list[Step] = field(default_factory=list)
    votes_begin: list[Step] = field(default_factory=list)
    steps_over: list[Step] = field(default_factory=list)
    optimized: bool = True
    norm: Any = None
    alarm: Alarm | None = None
    common: int = 0
    agreed: int | None = 0
    states: list[HasState] = field(default_factory=list)
    keeps_order: bool = False

    def present_optimizers(self) -> Iterable[Any]:
        """Return the optimizers that exist by now: a trainer makes its own after the call has begun."""
        own = getattr(self.trainer, "optimizer", None)
        return self.optimizers if own is None else (own,)

    def read_steps(self) -> None:
        """Pass on losses and gradient norms of the trainer until the call ends."""

        def note_norm(norm: Any) -> None:
            self.norm = norm

        for target, name, notes in (
            (self.trainer, "training_step", self.losses),
            (self.trainer.accelerator, "clip_grad_norm_", [note_norm]),
        ):
            self.hooks.enter_context(wrapped_methods(target, {name: [noting(one) for one in notes]}))

    def gradient_norm(self) -> float | None:
        """Return the norm of the gradients of the step that ends, over all parameters; None if a trainer does
        not clip them, and for a loop. It may still be computed on the device, which is waited for once."""
        if self.norm is not None:
            self.norm = float(tensor_files.local_part(self.norm))
        return self.norm

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


RewardWrapper = Callable[[Any, str, Callable[..., Any]], Callable[..., Any]]
"""Returns what is called in place of a reward function, from the function, its name, and what calls it in the
rank: that, or something that may call it.
"""


@dataclass(frozen=True, kw_only=True)
class AgentCall:
    """Something of an agent that TRL calls in a rollout.

    Attributes:
        name: on the board: `tool search`, `reset of Game`, `boot of Game`, `get_reward of Game`.
        kind: a tool of the script, a method of an environment (`step`), its `boot`, its `reset`, or its
            `get_reward`.
        function: of the script.
        row: of the rank's rollout, from the arguments of the call; None for a boot, which is of no row.
        environment: the instance that it belongs to now, from the arguments; None for a tool without one.
        renew: puts a new environment in its place, also for TRL, and returns the arguments of the call with
            it; raises what its boot raises. None for a call without one, and where TRL has no pool of them.
    """

    name: str
    kind: Literal["tool", "step", "boot", "reset", "reward"]
    function: Callable[..., Any]
    row: Callable[[tuple[Any, ...]], int | None] = lambda given: None
    environment: Callable[[tuple[Any, ...]], Any] = lambda given: None
    renew: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None


AgentWrapper = Callable[[AgentCall], Callable[..., Any]]
"""Returns what is called in place of the function of a call, with its arguments. That of an asynchronous
function is asynchronous.
"""
EndReasons = Callable[[], Sequence[EndReason] | None]
"""Says why each completion of this rank's last rollout ended; None where only its tokens tell."""


class Failed(float):
    """A reward that could not be computed, made by `failed`.

    TRL sees minus infinity, which survives its conversion to a tensor and its gather over the ranks.
    """

    reason: str


def failed(reason: str) -> Failed:
    """Return the reward of a sample for which a function has failed: the row leaves for this reason."""
    made = Failed(-math.inf)
    made.reason = reason
    return made


@dataclass(kw_only=True)
class RolloutPoints:
    """What features add to the rollouts of one trainer. Of each list, the first handler is the outermost.

    Attributes:
        facts: of the trainer.
        inputs: called around everything that is done for a rollout; they get the rows of the data set, and
            may pass on others.
        scoring: called around TRL's scoring of a rollout, inside its phase; they get the same rows, and
            what they return is the rollout that is trained on.
        generation: called around the generation of a rollout, inside its phase.
        turns: called around each turn of it: one, or several if completions call tools.
        rewards: called around the computation of rewards, outside its phase; they get what it is called
            with, and may return another table.
        reward_functions: what is called in place of each reward function, from the inside out.
        agents: what is called in place of each tool of an agent, and of what TRL calls of its environments;
            the last one counts.
        agent_limit_seconds: of each such call, as the user has given it; None for a learned one.
        leaving: why rows are left out of baseline and loss. The words are labels in the metrics.
        ends: says why completions ended, if a feature ends them.
        hooks: are closed when the trainer has trained.
    """

    facts: TrainerFacts
    inputs: list[Handler] = field(default_factory=list)
    scoring: list[Handler] = field(default_factory=list)
    generation: list[Handler] = field(default_factory=list)
    turns: list[Handler] = field(default_factory=list)
    rewards: list[Handler] = field(default_factory=list)
    reward_functions: list[RewardWrapper] = field(default_factory=list)
    agents: list[AgentWrapper] = field(default_factory=list)
    agent_limit_seconds: float | None = None
    leaving: list[RowReasons] = field(default_factory=list)
    ends: EndReasons = lambda: None
    hooks: ExitStack = field(default_factory=ExitStack)

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


class RankFeature:
    """A feature in one rank. It overrides the points at which it takes part; the others do nothing."""

    name: ClassVar[str]
    """Under which its settings are in `RankSettings.features`."""

    preloaded: ClassVar[tuple[str, ...]] = ()
    """Names of its modules that need torch, which the forkserver of the ranks imports in advance."""

    def fork(self, settings: RankSettings) -> None:
        """Fork what is to have the libraries of this process: it has one thread, and no accelerator."""

    def script_begins(self, session: Session) -> None:
        """Watch what the script imports. Neither torch nor transformers may be imported yet."""

    def needs(self, session: Session) -> tuple[Feature, ...]:
        """Return what it needs of transformers and TRL in this run: users are told if a release lacks it."""
        return ()

    def check_trainer(self, session: Session, trainer: Any) -> None:
        """Check a trainer that is about to train, or that the script asks to check.

        Raises:
            ConfigError: a setting of the feature is not in effect.
        """

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Add to the rollouts of a trainer that is about to train.

        Args:
            train_call: number of the call in the run.

        Raises:
            ConfigError: the trainer cannot do what the run asks for.
        """

    def call(self, session: Session, points: CallPoints) -> None:
        """Add to a call that is about to train; its state is not loaded yet. Called on every rank, after the
        ranks have agreed on where the call starts, and before its rollouts are hooked.
        """

    def end(self) -> None:
        """The script is over; the rank exits next. Called with a time limit."""
