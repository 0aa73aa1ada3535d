"""Observe a script that trains with neither a guarded `train()` call nor a loop (a no-trainer script).

`watch_optimizer_steps` notices an optimizer step outside both: the earliest certain sign, because
collectives, models and Accelerators are made before `train()`, too. Torch calls it before each step of each
optimizer. `watch_state_saving` notices `Accelerator.save_state`, which is progress of the run and what a
stop waits for. Begin and end of each save are on the board, so that the supervisor ends no rank during one;
while it is about to end the ranks, a further call waits. Saves inside a guarded `train()` are left alone.
What follows is for the supervisor to say, and loading the state for the script; no step is changed.
Installed by `attach.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from grpo_run.runtime.history.no_trainer_script import StateSaved, TrainsWithoutTrainer
from grpo_run.runtime.rank.session import Session

CHECKPOINT_PACKAGE = "torch.distributed.checkpoint"
"""Takes a step without gradients to create an optimizer's state before it loads it."""


def watch_optimizer_steps(module: Any, session: Session, guarded: Callable[[], bool]) -> None:
    """Register the hook.

    Args:
        module: `torch.optim.optimizer`, while or after it is imported.
        guarded: whether a guarded `train()` call or the loop is running, be it that it restores a checkpoint.
    """
    torch = sys.modules["torch"]

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        # traced by torch.compile, the hook must have no effect
        if torch.compiler.is_compiling() or guarded() or not session.is_rank:
            return
        slot = session.slot
        if slot.no_trainer_after != slot.train_call + 1:
            trainer = _trainer_at_work()
            if trainer is None:
                return
            slot.no_trainer_after = slot.train_call + 1
            slot.publish()
            session.journal.write(TrainsWithoutTrainer(rank=session.rank, trainer=trainer))
        session.own_steps += 1

    module.register_optimizer_step_pre_hook(before_step)


def _trainer_at_work() -> str | None:
    """Return the class of the Trainer whose method takes the step; empty if there is none, None if it is no
    step of training.

    A hyperparameter search, and a class with a `train()` of its own, are not guarded. The class is the most
    derived one whose code runs. Local variables are not read: before Python 3.13 that keeps all of a
    function's variables, such as the first batch and its logits, until the function returns.
    """
    running: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(CHECKPOINT_PACKAGE):
            return None
        running.add(id(frame.f_code))
        frame = frame.f_back
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return ""
    found = [cls for cls in _with_subclasses(module.Trainer) if _runs(cls, running)]
    return max(found, key=lambda cls: len(cls.__mro__)).__qualname__ if found else ""


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _runs(cls: type[Any], running: Collection[int]) -> bool:
    """Whether a method that the class itself defines is among the running code objects, given by identity."""
    methods = (inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value))
    return any(id(getattr(method, "__code__", None)) in running for method in methods)


_WRAPPED = "_grpo_run_state_saving"
HOLD_SECONDS = 10.0
"""How long a call may wait for the end of the ranks. The supervisor decides within a few tenths of a
second.
"""
HOLD_POLL_SECONDS = 0.02


def watch_state_saving(module: Any, session: Session, guarded: Callable[[], bool]) -> None:
    """Wrap `Accelerator.save_state`. A second call has no effect.

    Args:
        module: `accelerate.accelerator`.
        guarded: whether a guarded `train()` call or the loop is running.
    """
    original = module.Accelerator.save_state
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = session.slot
        if not session.is_rank or guarded():
            return original(self, *args, **kwargs)
        _wait_while_ranks_are_ended(session)
        slot.save_state_calls += 1
        slot.publish()
        try:
            saved = original(self, *args, **kwargs)
        except BaseException:
            slot.save_state_calls -= 1
            slot.publish()
            raise
        session.journal.write(StateSaved(rank=session.rank, path=str(saved or "")))
        slot.save_state_calls += 1
        slot.publish()
        return saved

    setattr(save_state, _WRAPPED, True)
    module.Accelerator.save_state = save_state


def _wait_while_ranks_are_ended(session: Session) -> None:
    deadline = time.monotonic() + HOLD_SECONDS
    while session.board.ends_ranks and time.monotonic() < deadline:
        time.sleep(HOLD_POLL_SECONDS)
