"""Notice that a script takes optimizer steps by itself: outside a guarded `train()` call, and outside the loop.

An optimizer step is the earliest sign that is certain: collectives, models and Accelerators are made before `train()`,
too. Called by torch before each step of each optimizer. The supervisor says what follows from it; nothing here changes the
step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from grpo_run.trainers.memory_plan.no_effect import warn_of_no_effect
from grpo_run.trainers.rank.session import Session

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
        if slot.alone_after != slot.train_call + 1:
            trainer = _trainer_at_work()
            if trainer is None:
                return
            slot.alone_after = slot.train_call + 1
            slot.publish()
            session.journal.write("own_training", rank=session.rank, trainer=trainer)
            if not trainer:
                warn_of_no_effect(session)
        session.own_steps += 1

    module.register_optimizer_step_pre_hook(before_step)


def _trainer_at_work() -> str | None:
    """Return the class of the Trainer whose method takes the step; empty if there is none, None if it is no step of training.

    A hyperparameter search, and a class with a `train()` of its own, are not guarded.
    """
    module = sys.modules.get("transformers.trainer")
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(CHECKPOINT_PACKAGE):
            return None
        owner = frame.f_locals.get("self")
        if module is not None and isinstance(owner, module.Trainer):
            found = type(owner).__qualname__
        frame = frame.f_back
    return found
