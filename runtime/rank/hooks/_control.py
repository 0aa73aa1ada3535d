"""What callbacks ask of the trainer on one rank is done on all ranks.

A callback may end training, save or evaluate because of a metric or a clock of its own rank. Saves,
evaluations and backward passes are collective, so under torchrun the other ranks wait until a timeout. Here
the flags of transformers' `TrainerControl` that the schedule has not set (`DefaultFlowCallback`) are put to
the vote:

    after a step     in the vote on that step. Asked for on all ranks: done at once, as under torchrun. On
                     some: not done yet, and done on all ranks after the next step.
    after a log line, an evaluation, a save or an epoch
                     all ranks are there, and agree at once.

If the data of some ranks ends after a step, the epoch ends there on all. Called by `_callback.py` and
`train_call.py`. Not put to the vote: a stop among the micro-batches of a step (`on_substep_end`). Data that
ends is seen only where all ranks are on one host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import DefaultFlowCallback, TrainerCallback

from grpo_run.runtime.rank.hooks._phases import UNMARKED_CALLBACKS, full_name
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.step_vote import NO_REQUESTS
from grpo_run.runtime.rank.vote import ControlRequests, either
from grpo_run.runtime.upstream.patches import wrapped_methods

WORDS = dict(zip(ControlRequests._fields, ("stop", "end the epoch", "save", "evaluate", "log"), strict=True))
LIBRARY_CALLBACKS = (*UNMARKED_CALLBACKS, "transformers.integrations.", "trl.")
"""Callbacks whose `on_log` sets no flag."""


def read_flags(control: Any) -> ControlRequests:
    """Return the flags of a `TrainerControl`."""
    return ControlRequests(*(bool(getattr(control, name)) for name in ControlRequests._fields))


def set_flags(control: Any, flags: ControlRequests) -> None:
    """Set all flags of a `TrainerControl`."""
    for name, value in flags._asdict().items():
        setattr(control, name, value)


def without(flags: ControlRequests, others: ControlRequests) -> ControlRequests:
    """Return the flags that are not set in `others`."""
    return ControlRequests(*(one and not other for one, other in zip(flags, others, strict=True)))


def stops(flags: ControlRequests) -> ControlRequests:
    """Return the flags that end training or an epoch; the others concern one step."""
    return ControlRequests(flags.should_training_stop, flags.should_epoch_stop)


def _has_own_log(callback: object) -> bool:
    own = getattr(type(callback), "on_log", None) is not TrainerCallback.on_log
    return own and not full_name(callback).startswith(LIBRARY_CALLBACKS)


class ControlVote:
    """The flags of one `train()` call on this rank. Making it is collective.

    Args:
        collect_vote: collects the step vote in progress; no other collective may come before that.
    """

    def __init__(self, trainer: Any, session: Session, collect_vote: Callable[[], object]) -> None:
        self._trainer = trainer
        self._session = session
        self._collect_vote = collect_vote
        own_log = any(map(_has_own_log, trainer.callback_handler.callbacks))
        self._log_may_stop = bool(session.votes.maximum(int(own_log)))
        self._scheduled = NO_REQUESTS
        self._stops = NO_REQUESTS
        """The stops that all ranks have agreed on."""
        self._names: dict[str, str] = {}
        """By flag: the callback that has set it last."""
        self._said: set[str] = set()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Within the block, tell what the schedule sets from what the script sets."""
        for callback in self._trainer.callback_handler.callbacks:
            if type(callback) is DefaultFlowCallback:
                schedule = [self._schedule]
                with wrapped_methods(callback, {"on_step_end": schedule, "on_epoch_end": schedule}):
                    yield
                return
        yield

    def _schedule(
        self, original: Callable[..., Any], args: Any, state: Any, control: Any, **kwargs: Any
    ) -> Any:
        held = read_flags(control)
        set_flags(control, NO_REQUESTS)
        control = original(args, state, control, **kwargs) or control
        self._scheduled = read_flags(control)
        set_flags(control, either(held, self._scheduled))
        return control

    def note(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a callback's method, and note by which name it sets flags."""
        control = self._trainer.control
        before = read_flags(control)
        try:
            return method(*args, **kwargs)
        finally:
            set_now = without(read_flags(control), before)._asdict()
            self._names.update({flag: name for flag, is_set in set_now.items() if is_set})

    def begin_epoch(self) -> None:
        """Forget the end of the epoch before, as transformers does."""
        self._stops = self._stops._replace(should_epoch_stop=False)

    def begin_step(self, step: int) -> None:
        """Let the other ranks know if this rank's data ends with this step. Its batches have been read."""
        loading = self._trainer.accelerator.gradient_state
        if not loading.in_dataloader or loading.end_of_dataloader:
            session = self._session
            session.board.note_data_end(session.rank % session.local_world_size, step)

    def asked(self, control: Any) -> ControlRequests:
        """Return what the script asks for on this rank after a step, besides the schedule."""
        return without(read_flags(control), either(self._scheduled, self._stops))

    def answer(self, control: Any, step: int, asked: ControlRequests, now: ControlRequests) -> None:
        """Set the flags after a step.

        Args:
            asked: for on this rank.
            now: what all ranks do after this step, of what was asked for on any rank.
        """
        self._say(without(asked, now), step, f"all ranks do so after step {step + 1}")
        if self._data_ends_here(step):
            now = now._replace(should_epoch_stop=True)
        self._stops = either(self._stops, stops(now))
        set_flags(control, either(self._stops, either(self._scheduled, now)))

    def end_epoch(self, control: Any, step: int) -> None:
        """Agree on what callbacks ask for at the end of an epoch. Collective."""
        by_some = self._agree(control, step, self.asked(control))
        set_flags(control, either(read_flags(control), either(self._scheduled, by_some)))

    def settle(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Log, evaluate and save, and agree on stops that callbacks ask for meanwhile. Collective.

        Args:
            original: the trainer's method.
        """
        done = read_flags(self._trainer.control)
        result = original(*args, **kwargs)
        control = self._trainer.control
        if done.should_evaluate or done.should_save or (done.should_log and self._log_may_stop):
            asked = stops(self.asked(control))
            by_some = self._agree(control, self._trainer.state.global_step, asked)
            if by_some.should_save and not done.should_save:
                control.should_save = True
                original(*args, **kwargs)
        return result

    def _agree(self, control: Any, step: int, asked: ControlRequests) -> ControlRequests:
        """Set what was asked for on any rank; return what was asked for on some only. Collective."""
        self._collect_vote()
        by_all, by_some = self._session.votes.requests(asked)
        now = either(by_all, by_some)
        self._say(without(asked, by_all), step, "all ranks do so now")
        self._stops = either(self._stops, stops(now))
        set_flags(control, either(read_flags(control), stops(now)))
        return by_some

    def _data_ends_here(self, step: int) -> bool:
        """Whether the data of some ranks has ended with this step, and that of others has not.

        Each rank has noted the end before the step's backward pass, which no rank leaves before all have
        taken part in it: all ranks read the same.
        """
        session = self._session
        if session.world_size != session.local_world_size:
            return False
        ended = [rank for rank, last in enumerate(session.board.data_ends()) if last == step]
        if not ended or len(ended) == session.world_size:
            return False
        if session.rank == ended[0]:
            ranks = ", ".join(map(str, ended))
            self._say_once(
                "data",
                f"the data of rank {ranks} ended with step {step}, that of the other ranks did not: the epoch"
                " ends there on all ranks",
            )
        return True

    def _say(self, asked: ControlRequests, step: int, consequence: str) -> None:
        flags = [flag for flag, is_set in asked._asdict().items() if is_set]
        if flags:
            who = " and ".join(dict.fromkeys(self._names.get(flag, "the script") for flag in flags))
            words = " and ".join(WORDS[flag] for flag in flags)
            self._say_once(
                f"{who} {words}",
                f"rank {self._session.rank}: {who} asked to {words} after step {step}, but not on every rank:"
                f" {consequence}",
            )

    def _say_once(self, subject: str, text: str) -> None:
        if subject not in self._said:
            self._said.add(subject)
            self._session.show_warning(text)
