"""Notice that a script takes optimizer steps by itself: outside a guarded `train()` call, and outside the loop.

An optimizer step is the earliest sign that is certain: collectives, models and Accelerators are made before `train()`,
too. Called by torch before each step of each optimizer. The supervisor says what follows from it; nothing here changes the
step.
"""

from __future__ import annotations

import sys
from typing import Any

from grpo_run.trainers.rank.session import Session
from grpo_run.watchdog.observation import RankState


def watch_optimizer_steps(module: Any, session: Session) -> None:
    """Register the hook.

    Args:
        module: `torch.optim.optimizer`, while or after it is imported.
    """
    torch = sys.modules["torch"]

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        # traced by torch.compile, the hook must have no effect
        if session.slot.state is RankState.training or torch.compiler.is_compiling():
            return
        if not session.is_rank:
            return
        session.own_steps += 1
        slot = session.slot
        if slot.alone_after != slot.train_call + 1:
            slot.alone_after = slot.train_call + 1
            slot.publish()
            session.journal.write("own_training", rank=session.rank, trainer=_trainer_at_work())

    module.register_optimizer_step_pre_hook(before_step)


def _trainer_at_work() -> str:
    """Return the class of the Trainer whose method takes the step; empty if there is none.

    A hyperparameter search, and a class with a `train()` of its own, are not guarded.
    """
    module = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1)
    while module is not None and frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, module.Trainer):
            return type(owner).__qualname__
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
