"""The memory that a rank may use, and its usage between passes: of its GPU, or of a simulated one for a number of tokens.

Called by `rollouts.py`. A simulated limit is a fault of `--inject` with `tokens=N`: above so many tokens memory runs out, so the
forecast takes a token for 1 MiB and knows the limit.
"""

from __future__ import annotations

from typing import Any, Protocol

from grpo_run.trainers.accounting.device import DeviceMemory
from grpo_run.trainers.forecast.fit import Size
from grpo_run.trainers.rank.session import Session

SIMULATED_TOKEN_BYTES = 2**20
"""Any size would do: predictions and limit are in the same unit."""


class Memory(Protocol):
    """The memory of one rank."""

    def limit_bytes(self) -> int:
        """Return what the rank may use in all; 0 if that is not known."""

    def allocated_bytes(self) -> int:
        """Return what is allocated now."""

    def gradient_bytes(self, model: Any) -> int:
        """Return what the gradients of a model need that are kept between passes."""

    def simulated_peak(self, size: Size) -> int | None:
        """Return what a pass needs; None if it is measured."""


class GpuMemory:
    """Memory of the rank's GPU; without one, nothing is known."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device

    def limit_bytes(self) -> int:
        """See `Memory`."""
        return self._device.usable_bytes()

    def allocated_bytes(self) -> int:
        """See `Memory`."""
        return self._device.sizes()[0]

    def gradient_bytes(self, model: Any) -> int:
        """See `Memory`."""
        return sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad)

    def simulated_peak(self, size: Size) -> int | None:
        """See `Memory`."""
        return None


class SimulatedMemory:
    """Memory that suffices for a number of tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def limit_bytes(self) -> int:
        """See `Memory`."""
        return self._tokens * SIMULATED_TOKEN_BYTES

    def allocated_bytes(self) -> int:
        """See `Memory`."""
        return 0

    def gradient_bytes(self, model: Any) -> int:
        """See `Memory`."""
        return 0

    def simulated_peak(self, size: Size) -> int | None:
        """See `Memory`."""
        return size[0] * size[1] * SIMULATED_TOKEN_BYTES


def memory_of(session: Session) -> Memory:
    """Return the memory of this rank."""
    limits = [one.tokens for one in session.config.injections if one.tokens and one.rank == session.rank]
    return SimulatedMemory(min(limits)) if limits else GpuMemory(session.device_memory)
