"""Memory for loaded tensors: pages that one file's tensors have released are reused for the next file.

A trainer loads the weights, copies them into its model and drops them, and then loads the optimizer's state, which
it keeps. Most of the time of loading is the kernel's for pages that are used for the first time; they are the same
pages with this pool. Used by `tensors.py`, for one checkpoint.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from grpo_run.runtime.staging.buffer import aligned

MINIMUM_BYTES = 1 << 20
"""Smaller tensors get memory of their own from torch, which has some at hand."""


class MemoryPool:
    """Tensors in one private mapping, and in memory of their own if it has no space. Not for several threads."""

    def __init__(self) -> None:
        self._region: memoryview | None = None
        self._position = 0
        self._taken: list[weakref.ref[memoryview]] = []

    def begin_file(self, size_bytes: int) -> None:
        """Prepare for the tensors of a file: use the region again if all its tensors are gone, or else make a new one.

        Args:
            size_bytes: of the file. The kernel provides memory when it is used.

        Raises:
            OSError: there is no address space.
        """
        if self._region is not None and all(view() is None for view in self._taken):
            self._position = 0
            self._taken.clear()
        elif size_bytes >= MINIMUM_BYTES:
            # a region that still has tensors lives as long as they do
            region = mmap.mmap(-1, aligned(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._region, self._position, self._taken = memoryview(region), 0, []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a tensor of bytes with undefined content, which no other tensor refers to."""
        if (
            self._region is None
            or size_bytes < MINIMUM_BYTES
            or self._position + size_bytes > len(self._region)
        ):
            return torch.empty(size_bytes, dtype=torch.uint8)
        # the tensor's storage refers to this object, and nothing else does
        view = self._region[self._position : self._position + size_bytes]
        self._position += aligned(size_bytes)
        self._taken.append(weakref.ref(view))
        return torch.frombuffer(view, dtype=torch.uint8)
