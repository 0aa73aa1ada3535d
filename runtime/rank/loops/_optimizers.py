"""Observes the steps of all optimizers: runs hooks before each one, and detects gradients that none has used.

Uses torch's global hooks, because a script may step optimizers that are not in the loop's `state`. Called by
`run.py`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grpo_run.runtime.upstream import tensor_files

OBSERVED = 8
"""Parameters whose gradients are compared; a backward pass reaches at least one of them."""


class OptimizerSteps:
    """The steps of all optimizers in this process, from `install` to `remove`.

    Args:
        optimizers: those of the loop's `state`, whose gradients are observed.
        before, after: called before and after each step that the main thread of this process takes.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._optimizers = list(optimizers)
        self._before = before
        self._after = after
        self._pid = os.getpid()
        self._handles: list[Any] = []
        self.taken = False
        """Whether an optimizer has taken a step in the present step of the loop."""
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._observed: list[torch.Tensor] = []

    def install(self) -> None:
        """Begin to observe."""
        self._handles = [
            register_optimizer_step_pre_hook(lambda *arguments: self._on_step(self._before)),
            register_optimizer_step_post_hook(lambda *arguments: self._on_step(self._note_taken)),
        ]

    def remove(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_step(self, act: Callable[[], None]) -> None:
        if os.getpid() == self._pid and threading.current_thread() is threading.main_thread():
            act()

    def _note_taken(self) -> None:
        self.taken = True
        self._after()

    def take_pending(self) -> bool:
        """Return whether gradients were added since the last optimizer step, and begin the next step of the
        loop.

        Gradients that a step has used stay until the script sets them to zero, and those that are not finite
        have made a gradient scaler skip the step: neither is pending.
        """
        taken, self.taken = self.taken, False
        if taken:
            self._used = {
                index: (weakref.ref(gradient), gradient._version) for index, gradient in self._gradients()
            }
            return False
        added = [
            gradient
            for index, gradient in self._gradients()
            if index not in self._used
            or self._used[index][0]() is not gradient
            or self._used[index][1] != gradient._version
        ]
        local = [tensor_files.local_part(gradient) for gradient in added]
        with torch.no_grad():
            return (
                bool(local)
                and all(bool(one.isfinite().all()) for one in local)
                and any(bool(one.any()) for one in local)
            )

    def _gradients(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the present gradients of the observed parameters."""
        if not self._observed:
            parameters = [
                parameter
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ]
            every = max(1, len(parameters) // OBSERVED)
            self._observed = [*parameters[::every], *parameters[-1:]]
        for index, parameter in enumerate(self._observed):
            if parameter.grad is not None:
                yield index, parameter.grad
