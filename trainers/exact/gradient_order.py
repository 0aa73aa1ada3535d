"""In which order gradients became ready in a run's first backward pass under DDP, kept for the ranks of a recovery.

DDP adds gradients up in buckets that it lays out anew after its first synchronised backward pass, in the order
the gradients became ready. Where an element lies in its bucket decides in which order Gloo and NCCL add three or more
ranks' values, hence the last bit. A process that resumed would sum its first step in the first layout again, where
the run that was never hurt had long used the second. So the order is kept in checkpoints, and played to DDP with
gradients of zero before a resumed run's first step. Called by `state.py`. With two ranks, and where DDP never lays
its buckets out anew (`find_unused_parameters`), there is nothing to do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grpo_run.runtime.errors import CheckpointError

FEWEST_RANKS = 3
"""Of two addends the order does not matter."""


def concerned(model: Any, world_size: int) -> bool:
    """Whether DDP lays out this model's buckets anew, and that can change a bit. `model` is the wrapped one."""
    return (
        world_size >= FEWEST_RANKS
        and isinstance(model, DistributedDataParallel)
        and not model.find_unused_parameters
        and not model.static_graph
        and not model.parameters_to_ignore
        and not model._comm_hooks  # a hook may keep a state of its own
    )


class GradientOrder:
    """Of one `train()` call's model.

    Args:
        model: a `DistributedDataParallel` that is `concerned`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self._seen: list[int] = []
        self._hooks: list[Any] = []

    @property
    def order(self) -> list[int] | None:
        """Places of parameters among those that are trained, as they became ready; None before it is known."""
        return list(self._seen) if len(self._seen) == len(self._parameters) else None

    def record(self) -> None:
        """Watch the first backward pass that synchronises."""
        for index, parameter in enumerate(self._parameters):
            hook = functools.partial(self._ready, index)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _ready(self, index: int, _: torch.Tensor) -> None:
        if self._model.require_backward_grad_sync and self._hooks:
            self._seen.append(index)
            if len(self._seen) == len(self._parameters):
                self.close()

    def replay(self, order: list[int]) -> None:
        """Let DDP see gradients, all zero, become ready in `order`. Collective: one sum of all gradients.

        Raises:
            CheckpointError: the order is of another model.
        """
        if sorted(order) != list(range(len(self._parameters))):
            raise CheckpointError(
                f"the checkpoint holds the order of {len(order)} gradients, the model has {len(self._parameters)}"
            )
        self._model.reducer.prepare_for_backward([])
        for index in order:
            parameter = self._parameters[index]
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
        for parameter in self._parameters:
            parameter.grad = None
        self._seen = list(order)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
