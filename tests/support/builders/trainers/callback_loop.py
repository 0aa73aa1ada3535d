"""A `train()` call that calls the events of the guard's callback, with one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from transformers import TrainerControl, TrainerState

from grpo_run.runtime.rank.hooks._callback import GuardCallback
from grpo_run.runtime.rank.hooks._control import ControlVote
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.saving._cadence import Cadence
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.step.events import StepEvents
from grpo_run.runtime.rank.step.step_vote import StepVote, UserRequests
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.rank.vote import Vote
from grpo_run.watchdog.observation import Slot

Reading = Callable[[], Slot]
Events = Callable[[], list[dict[str, Any]]]


class FakeCadence(Cadence):
    """A cadence with given steps; records what it is asked."""

    def __init__(self, *, wanted: tuple[int, ...] = (), fixed: tuple[int, ...] = ()) -> None:
        super().__init__(0, failure_seconds=1.0, notify=lambda *arguments: None, clock=lambda: 0.0)
        self.wanted_steps, self.fixed_steps = wanted, fixed
        self.begun: list[int] = []
        self.asked: list[int] = []

    def begin(self, first_step: int) -> None:
        """Record the first step."""
        self.begun.append(first_step)

    def wanted(self, step: int) -> bool:
        """Record the question."""
        self.asked.append(step)
        return step in self.wanted_steps

    def fixed(self, step: int) -> bool:
        """Use the given steps."""
        return step in self.fixed_steps


class Loop:
    """A `train()` call of 10 steps that calls the callback's events as transformers does."""

    def __init__(
        self,
        session: Any,
        *,
        cadence: Cadence | None = None,
        requests: UserRequests | None = None,
        hooks_before_optimizer: bool = True,
        restoring: bool = False,
        args: Any = None,
    ) -> None:
        self.cadence = cadence or FakeCadence()
        self.points = CallPoints(train_call=1, trainer=None, hooks=ExitStack())
        self.step_vote = StepVote(session, requests or UserRequests(session.board), self.points)
        exact: Any = SimpleNamespace(
            begin=lambda folder: None, begin_epoch=int, begin_step=int, end=int, close=int
        )
        self.saver: Any = SimpleNamespace(cadence=self.cadence, stopping=False, saved_step=-1)
        self.saver.decide = functools.partial(Saver.decide, self.saver)
        events = StepEvents(session, 1, self.step_vote, self.saver, self.points)
        self.state = TrainerState(global_step=0, max_steps=10)
        self.control = TrainerControl()
        loading = SimpleNamespace(in_dataloader=True, end_of_dataloader=False)
        trainer = SimpleNamespace(
            callback_handler=SimpleNamespace(callbacks=[]),
            control=self.control,
            state=self.state,
            accelerator=SimpleNamespace(gradient_state=loading),
            args=args,
        )
        control = ControlVote(trainer, session, self.step_vote.collect)
        restored: Any = SimpleNamespace(folder=None, finished=True) if restoring else None
        self.callback = GuardCallback(
            session, 1, events, control, self.saver, exact, TrainerFacts.of(trainer, 1), restored=restored
        )
        self.args: Any = args
        self.hooks_before_optimizer = hooks_before_optimizer
        self.saved: list[int] = []
        self.stopped_at: int | None = None

    def begin(self, step: int = 0) -> None:
        """Start the loop at `step`."""
        self.state.global_step = step
        self.callback.on_train_begin(self.args, self.state, TrainerControl())

    def step(self) -> None:
        """Take one optimizer step; save and stop as the saver would."""
        control = TrainerControl()
        self.callback.on_step_begin(self.args, self.state, control)
        if self.hooks_before_optimizer:
            self.callback.on_pre_optimizer_step(self.args, self.state, control)
        self.state.global_step += 1
        self.callback.on_step_end(self.args, self.state, control)
        assert not control.should_save, "the script would notice it"
        assert not control.should_training_stop, "the checkpoint would tell a stop by the script"
        if self.cadence.required:
            self.step_vote.collect()
            self.saved.append(self.state.global_step)
        if self.saver.stopping and self.stopped_at is None:
            self.stopped_at = self.state.global_step


def with_flags(vote: Vote, **flags: bool) -> Vote:
    """Return the vote as if another rank had set the flags."""
    return replace(vote, flags=vote.flags._replace(**flags))
