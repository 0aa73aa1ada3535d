"""Log collectives that the recorder does not see: grpo-run's own, and DDP's in hand-written loops.

`OwnLog` is called by the transports (`transport.py`, `gloo_transport.py`). Its entries look like those of
the script's collectives, so that a rank that waits in one is seen, and a deadlock proved, in the same way.
`log_backward_passes` logs the backward passes of DDP models, whose all-reduces C++ issues; `session.py`
installs it when torch is imported. It uses `torch.autograd.backward` and the constructor of
`DistributedDataParallel`. A Trainer's passes are logged by `runtime/rank/hooks/train_call.py`, which knows
when gradients are synchronized. Changes no value.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from grpo_run.runtime.rank.collective_recorder import Recorder
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress


class OwnLog:
    """The log of one group, which has all ranks as members.

    Torch knows nothing of a collective in memory, so its transport also reports each change (`waits`,
    `completed`).

    Args:
        recorder: writes the entries.
        group: name of the group.
        world_size: number of ranks.
        limited: a collective in memory times out too soon for a hang.
    """

    def __init__(self, recorder: Recorder, group: str, *, world_size: int, limited: bool = False) -> None:
        self._recorder = recorder
        self._group = group
        self._members = (1 << world_size) - 1 if world_size <= 64 else 0
        self._limited = limited

    def issued(self, sequence: int, operation: str, tensor: Any, work: Any = None) -> int:
        """Log a collective; return the number of its entry.

        Args:
            sequence: its number in the group, from 1.
            operation: name of the process group method of torch.
            tensor: the input, or its shape.
            work: the handle that torch returned; None for a collective in memory, which is about to start.
        """
        return self._recorder.log_own(
            self._group, sequence, operation, tensor, work, members=self._members, limited=self._limited
        )

    @contextmanager
    def waits(self, number: int) -> Iterator[None]:
        """Mark a collective in memory as waited for by the calling thread, for the length of the block."""
        thread = threading.get_ident()
        self._recorder.mark(number, CollectiveProgress.waiting)
        if number and not self._limited:
            self._recorder.waiting.add(thread)
        try:
            yield
        finally:
            self._recorder.waiting.discard(thread)
            # not completed if it raises, but no thread waits any more
            self._recorder.mark(number, CollectiveProgress.enqueued)

    def completed(self, number: int) -> None:
        """Mark a collective in memory as completed."""
        self._recorder.mark(number, CollectiveProgress.completed)


class Integers(NamedTuple):
    """Stands for a tensor of 64-bit integers."""

    shape: tuple[int, ...]
    dtype: str = "int64"


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
