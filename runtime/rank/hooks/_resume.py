"""Restore a `train()` call that was over, or finished in an earlier attempt, without training.

Called by `train_call.py` around the original `train()`. `runtime/rank/step/resume.py` agrees on the
checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.rank.exact.state import ExactState
from grpo_run.runtime.rank.generators import read_generators, write_generators
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.patches import Handler, override_attributes, wrapped_methods


def epochs_skipped(trainer: Any, over: Callable[[], bool]) -> AbstractContextManager[None]:
    """Within the block, `train()` takes no step if `over` returns true when its first epoch begins."""
    if not hasattr(trainer, trainer_names.RUN_EPOCH):
        return _epochs_without_batches(trainer, over)

    def run_or_skip(run_epoch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not over():
            return run_epoch(*args, **kwargs)
        trainer.control.should_training_stop = True
        return None

    return wrapped_methods(trainer, {trainer_names.RUN_EPOCH: [run_or_skip]})


@contextmanager
def _epochs_without_batches(trainer: Any, over: Callable[[], bool]) -> Iterator[None]:
    """As `epochs_skipped` before transformers 5.3, where epochs are no method of their own: a skipped one has
    no batches and no events, and draws no random numbers.
    """
    drawn = []

    def unless_over(instead: Callable[[], Any]) -> list[Handler]:
        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return instead() if over() else original(*args, **kwargs)

        return [call]

    def begin() -> Any:
        drawn.append(read_generators())
        return trainer.control

    def read() -> tuple[list[Any], None]:
        trainer.control.should_training_stop = True
        return [], None

    def end() -> None:
        write_generators(drawn.pop())

    with (
        wrapped_methods(
            trainer.callback_handler,
            {"on_epoch_begin": unless_over(begin), "on_epoch_end": unless_over(lambda: trainer.control)},
        ),
        wrapped_methods(
            trainer, {"get_batch_samples": unless_over(read), trainer_names.AFTER_STEP: unless_over(end)}
        ),
    ):
        yield


class RestoredCall:
    """A call that goes on from a checkpoint, was over at its step, or was finished in an earlier attempt.

    A callback may end a call early (early stopping), and transformers ends it at the last step. If a rank is
    killed after the checkpoint of that step, nothing would end the call again: it would take a step more than
    the undisturbed call. The events at the end of the epoch, which follow the step, are made up for.

    Args:
        folder: the checkpoint directory that `train()` loads.
        finished: the call was finished in an earlier attempt and takes no steps now.
        ignore_keys: of the evaluation, as the script gave them to `train()`.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        exact: ExactState,
        *,
        folder: Path,
        finished: bool,
        ignore_keys: Any = None,
    ) -> None:
        self.folder = folder
        self.finished = finished
        self._trainer = trainer
        self._session = session
        self._exact = exact
        self._ignore_keys = ignore_keys
        self._over = finished

    def begin(self) -> None:
        """Call when the exact state of a call that is not finished is restored. Collective.

        A call that the script had ended on some ranks only is a fault, which a restart must not repeat.
        """
        trainer, state = self._trainer, self._trainer.state
        over = self._exact.script_stopped or state.global_step >= state.max_steps
        self._over = self._session.votes.maximum(int(not over)) == 0
        if not self._over or self._exact.epoch_ended:
            return
        self._exact.load_rng()
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, state, trainer.control)
        if hasattr(trainer, trainer_names.PENDING_LOSS):
            pending = getattr(trainer, trainer_names.PENDING_LOSS)
        else:  # a local variable of the loop before transformers 5.3: better no line than one of 0
            pending, trainer.control.should_log = torch.zeros((), device=trainer.args.device), False
        getattr(trainer, trainer_names.AFTER_STEP)(
            pending, None, trainer.model_wrapped, None, state.epoch, self._ignore_keys, time.time()
        )

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Within the block, `train()` takes no step if the call was over, and does not evaluate at its start
        again.
        """
        with (
            epochs_skipped(self._trainer, lambda: self._over),
            override_attributes(self._trainer.args, eval_on_start=False),
        ):
            yield
