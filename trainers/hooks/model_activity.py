"""Records activity inside long phases: counts forward passes, logs DDP's backward as one collective.

Called by `train_call.py`. The counts show the watchdog that a rank inside a long phase, such as generation,
still makes progress. Uses torch's public forward hooks. A compiled model gets no hook, because a hook would
break its graph. Does not change any value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.rank.session import Session


@contextmanager
def record_model_activity(trainer: Any, session: Session) -> Iterator[None]:
    """Count the model's forward passes and log its backward passes for the length of the block."""
    slot, accelerator, model = session.slot, trainer.accelerator, trainer.model
    handle = None
    if getattr(model, "_compiled_call_impl", None) is None and not trainer.args.torch_compile:
        handle = model.register_forward_pre_hook(lambda module, inputs: slot.record_pass())
    backward = accelerator.backward

    @functools.wraps(backward)
    def logged_backward(*args: Any, **kwargs: Any) -> Any:
        if not accelerator.sync_gradients:
            return backward(*args, **kwargs)
        with session.recorder.backward(trainer.model_wrapped):
            return backward(*args, **kwargs)

    try:
        with override_attributes(accelerator, backward=logged_backward):
            yield
    finally:
        if handle is not None:
            handle.remove()
