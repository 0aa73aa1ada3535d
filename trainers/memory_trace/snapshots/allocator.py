"""The CUDA allocator as snapshots need it, behind an interface that tests replace: most machines that test this have no GPU.

Used by `history.py`. Imports nothing of torch by itself, and never initializes CUDA: that is up to the script.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from grpo_run.trainers.upstream import memory_names


class Allocator(Protocol):
    """An allocator that can record its history."""

    def is_ready(self) -> bool:
        """Whether the script uses it."""

    def is_recording(self) -> bool:
        """Whether its history is recorded, by whomever."""

    def record(self, most_entries: int) -> None:
        """Record from now on, in a ring buffer. Raises RuntimeError if it cannot."""

    def observe_out_of_memory(self, call: Callable[[], None]) -> bool:
        """Call a function when memory runs out, before that is raised. Returns whether it will."""

    def snapshot(self) -> dict[str, Any]:
        """Return its blocks and its history."""


class CudaAllocator:
    """torch's caching allocator of this process."""

    def is_ready(self) -> bool:
        """Whether the script has initialized CUDA, which it does on the devices of its choice."""
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return cuda is not None and bool(cuda.is_initialized())

    def is_recording(self) -> bool:
        """Whether its history is recorded: the script may do that itself."""
        return memory_names.allocator_records()

    def record(self, most_entries: int) -> None:
        """Record from now on. Raises RuntimeError for an allocator without a history, such as `cudaMallocAsync`."""
        memory_names.record_allocations(most_entries)

    def observe_out_of_memory(self, call: Callable[[], None]) -> bool:
        """Call a function when memory runs out."""
        return memory_names.observe_out_of_memory(call)

    def snapshot(self) -> dict[str, Any]:
        """Return its blocks and its history; peaks and other statistics stay as they are."""
        return memory_names.allocator_snapshot()
