"""Optimizers that cannot run here, as their state: what bitsandbytes keeps for each weight. Used by
`_traced_trainer.py`.

Its updates are kernels that work in place and allocate nothing. Never compared with a run: bitsandbytes needs
a GPU.
"""

from __future__ import annotations

from typing import Any

import torch

SMALLEST_COMPRESSED = 4096
"""Tensors with fewer values keep their state in fp32 (bitsandbytes' `min_8bit_size`)."""
BLOCK = 256
"""Values that share one scale in fp32."""


class NamedOptimizer(torch.optim.Optimizer):
    """Allocates the state of an optimizer in its first step, and nothing else.

    Embeddings keep their state in fp32: transformers tells bitsandbytes so.

    Args:
        model: whose trained weights are optimized.
        states: tensors that are kept for each weight.
        width: bytes of a value of them.
    """

    def __init__(self, model: Any, states: int, width: int) -> None:
        self._states, self._width = states, width
        self._whole = {
            id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
        }
        super().__init__([one for one in model.parameters() if one.requires_grad], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Allocate state for weights that have a gradient and no state yet."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not self.state[weight]:
                    self.state[weight] = {str(number): self._state(weight) for number in range(self._states)}

    def _state(self, weight: Any) -> tuple[Any, ...]:
        count = weight.numel()
        if self._width == 4 or count < SMALLEST_COMPRESSED or id(weight) in self._whole:
            return (torch.empty(count),)
        return torch.empty(count, dtype=torch.uint8), torch.empty(-(-count // BLOCK))
