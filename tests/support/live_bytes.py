"""The live bytes of a real run by phase, for comparison with what `plan` predicts. Used by
`measured_memory.py`.

Counts every storage once, by the address of its bytes, from the operator that first sees it until it is
freed. Shares nothing with the product. Buffers inside an operator are not seen; the memory events of torch's
profiler have them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts.

    Attributes:
        peaks: of the last time that each phase ran, in bytes. A phase inside another one does not count for
            the outer one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peaks: dict[str, float] = {}
        self._sizes: dict[int, int] = {}
        self._total = 0
        self._phases: list[str] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is alive inside for a phase."""
        self._phases.append(name)
        self.peaks[name] = self._total
        try:
            yield
        finally:
            self._phases.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages of its results, and of its arguments: another thread may
        have loaded them.
        """
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._sizes or size == 0:
            return
        self._sizes[address] = size
        weakref.finalize(storage, self._freed, address).atexit = False
        self._total += size
        if self._phases:
            name = self._phases[-1]
            self.peaks[name] = max(self.peaks[name], self._total)

    def _freed(self, address: int) -> None:
        self._total -= self._sizes.pop(address)
