"""Observe a script that trains with neither a guarded `train()` call nor a loop (a no-trainer script).

`watch_optimizer_steps` notices an optimizer step outside both: the earliest certain sign, because
collectives, models and Accelerators are made before `train()`, too. Torch calls it before each step of each
optimizer. What follows is for the supervisor to say; no step is changed. Installed by `attach.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

from grpo_run.runtime.history.no_trainer_script import TrainsWithoutTrainer
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
