"""Log the backward passes of DDP models in a hand-written loop.

C++ issues the all-reduces of such a pass, so that nothing else in the log says where the rank is. Installed by the
session when torch is imported; uses `torch.autograd.backward` and the constructor of `DistributedDataParallel`. A
Trainer's passes are logged by `hooks/model_activity.py`, which knows when gradients are synchronized. Changes no value.
"""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import ExitStack
from typing import Any

from grpo_run.trainers.rank.collectives.recorder import Recorder


def log_backward_passes(recorder: Recorder, module: Any) -> None:
    """Wrap torch's functions. Call it once per process.

    Args:
        recorder: writes the log.
        module: the module `torch.nn.parallel.distributed`.
    """
    import torch

    models: weakref.WeakSet[Any] = weakref.WeakSet()
    original_init = module.DistributedDataParallel.__init__
    original_backward: Any = torch.autograd.backward

    @functools.wraps(original_init)
    def init(model: Any, *args: Any, **kwargs: Any) -> None:
        original_init(model, *args, **kwargs)
        models.add(model)

    @functools.wraps(original_backward)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not models or threading.get_ident() in recorder.in_backward:
            return original_backward(*args, **kwargs)
        groups = {id(model.process_group): model for model in models if model.require_backward_grad_sync}
        with ExitStack() as logged:
            for model in groups.values():
                logged.enter_context(recorder.backward(model))
            return original_backward(*args, **kwargs)

    module.DistributedDataParallel.__init__ = init
    torch.autograd.backward = backward
