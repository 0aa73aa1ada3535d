"""Lets a rank be seen at work inside long phases: forward passes counted, DDP's backward noted.

Called by `attach.py` around a `train()` call. Uses torch's public forward hooks; puts nothing in a compiled model,
where a hook would break the graph. Changes no value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from grpo_run.trainers.rank.session import Session


def show_work(trainer: Any, session: Session) -> Callable[[], None]:
    """Count the model's forward passes and note its backwards; returns what undoes both."""
    slot, accelerator, model = session.slot, trainer.accelerator, trainer.model
    handle = None
    if getattr(model, "_compiled_call_impl", None) is None and not trainer.args.torch_compile:
        handle = model.register_forward_pre_hook(lambda module, inputs: slot.count())
    backward = accelerator.backward

    @functools.wraps(backward)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if not accelerator.sync_gradients:
            return backward(*args, **kwargs)
        with session.recorder.backward(trainer.model_wrapped):
            return backward(*args, **kwargs)

    own = accelerator.__dict__.get("backward")
    accelerator.backward = noted

    def undo() -> None:
        if handle is not None:
            handle.remove()
        if own is None:
            del accelerator.backward
        else:
            accelerator.backward = own

    return undo
