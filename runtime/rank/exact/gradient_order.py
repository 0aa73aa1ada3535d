"""Save and restore the order in which DDP reduces gradients.

After its first synchronized backward pass, DDP rebuilds its gradient buckets in the order in which gradients
became ready. The position of an element in its bucket decides the order in which Gloo and NCCL add the values
of three or more ranks. A resumed process would use the initial buckets again for its first step, while an
uninterrupted run uses the rebuilt ones. So checkpoints contain the order, and `replay` makes DDP rebuild its
buckets before the first resumed step.

Called by `state.py`. Not needed with two ranks, or where DDP never rebuilds its buckets
(`find_unused_parameters`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from grpo_run.runtime.errors import CheckpointError

MINIMUM_RANKS = 3
"""A sum of two values does not depend on their order."""


def needs_gradient_order(model: Any, world_size: int) -> bool:
    """Whether DDP rebuilds the buckets of this wrapped model and the order can change a result."""
    return (
        world_size >= MINIMUM_RANKS
        and isinstance(model, DistributedDataParallel)
        and not model.find_unused_parameters
        and not model.static_graph
        and not model.parameters_to_ignore
        and not model._comm_hooks  # a hook may have state of its own
    )


class GradientOrder:
    """The gradient order of one `train()` call's model.

    Args:
        model: a `DistributedDataParallel` for which `needs_gradient_order` is true.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self._ready_order: list[int] = []
        self._hooks: list[Any] = []

    @property
    def order(self) -> list[int] | None:
        """Indices of trained parameters in the order their gradients became ready; None until it is known."""
        return list(self._ready_order) if len(self._ready_order) == len(self._parameters) else None

    def record(self) -> None:
        """Record the order during the first synchronized backward pass."""
        for index, parameter in enumerate(self._parameters):
            hook = functools.partial(self._on_ready, index)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def _on_ready(self, index: int, _: torch.Tensor) -> None:
        if self._model.require_backward_grad_sync and self._hooks:
            self._ready_order.append(index)
            if len(self._ready_order) == len(self._parameters):
                self.close()

    def replay(self, order: list[int]) -> None:
        """Run a backward pass of zero gradients in `order`. Collective: one all-reduce of all gradients.

        Raises:
            CheckpointError: the order is of another model.
        """
        if sorted(order) != list(range(len(self._parameters))):
            raise CheckpointError(
                f"the checkpoint contains the order of {len(order)} gradients, but the model has"
                f" {len(self._parameters)}"
            )
        self._model.reducer.prepare_for_backward([])
        for index in order:
            parameter = self._parameters[index]
            torch.autograd.backward(parameter, torch.zeros_like(parameter))
        for parameter in self._parameters:
            parameter.grad = None
        self._ready_order = list(order)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
