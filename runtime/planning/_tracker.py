"""Count what traced code has allocated: the peak of each phase of a step, by what it holds.

Used by `_trace.py` around fake tensors, which have sizes but no data. Two kinds of operators need data and
get a stand-in: reading a number (`.item()`), and selecting by a mask, whose number of selected positions the
caller says. Frees are seen when Python drops a storage, so nothing is recorded but the present.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from grpo_run.runtime.planning.job import KINDS
from grpo_run.runtime.upstream.dispatch_modes import TorchDispatchMode, tree_leaves

_KIND_OF_PHASE = {"load": "weights", "inputs": "rollout", "optimizer": "optimizer"}


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that keeps peaks.

    Args:
        weigh: returns the bytes that count for an allocation, from its bytes and its kind: rounding, or the
            share of one rank.

    Attributes:
        peaks: what was held at the highest total, by phase and window; the caller clears it. A phase is
            divided into windows because the highest total of a window grows linearly with the number of
            layers, and that of the whole phase does not.
        selected: how many positions a mask selects, for operators whose result depends on it.
    """

    def __init__(self, weigh: Callable[[int, str], float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.peaks: dict[tuple[str, int], dict[str, float]] = {}
        self.selected = 0
        self._weigh = weigh
        self._alive: dict[int, tuple[int, str]] = {}
        self._held = dict.fromkeys(KINDS, 0.0)
        self._total = self._highest = 0.0
        self.begin("load")

    def begin(self, phase: str, window: int = 0) -> None:
        """Say which phase begins; `window` numbers the parts of a phase that is interrupted."""
        self._kind = _KIND_OF_PHASE.get(phase, "activations")
        self._place = phase, window
        self._highest = -1.0
        self._add(0, self._kind)

    def begin_window(self) -> None:
        """Look for the peak of what follows apart from the rest of the phase."""
        kind = self._kind
        self.begin(self._place[0], self._place[1] + 1)
        self._kind = kind

    @contextlib.contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """Count what is allocated inside as a kind, in a window of its own."""
        before = self._kind
        self.begin_window()
        self._kind = kind
        try:
            yield
        finally:
            self._kind = before
            self.begin_window()

    def classify(self, tensor: Any, kind: str) -> None:
        """Say afterwards what a tensor holds."""
        key = tensor.untyped_storage()._cdata
        if key in self._alive:
            size, before = self._alive[key]
            self._alive[key] = size, kind
            self._add(-size, before)
            self._add(size, kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count the storages of its results."""
        result = self._stand_in(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _stand_in(self, func: Any, args: tuple[Any, ...]) -> Any:
        operators = torch.ops.aten
        if func is operators._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if func is operators.index.Tensor and _by_mask(args[1]):
            source, mask = args[0], args[1][0]
            return source.new_empty((self.selected, *source.shape[mask.dim() :]))
        if func in (operators.index_put_.default, operators._index_put_impl_.default) and _by_mask(args[1]):
            return args[0]
        if func is operators.index_put.default and _by_mask(args[1]):
            return args[0].clone()
        if func is operators.masked_select.default:
            return args[0].new_empty((self.selected,))
        if func is operators.masked_scatter_backward.default:
            return args[0].new_empty(args[2])
        if func is operators._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return _grouped_product(args[0], args[1], args[2])
        return None

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes(), self._kind
            self._add(*self._alive[key])
            weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        size, kind = self._alive.pop(key)
        self._add(-size, kind)

    def _add(self, size: int, kind: str) -> None:
        change = self._weigh(size, kind) if size >= 0 else -self._weigh(-size, kind)
        self._held[kind] += change
        self._total += change
        if self._total > self._highest:
            self._highest = self._total
            self.peaks[self._place] = dict(self._held)


def _grouped_product(left: Any, right: Any, offsets: Any) -> Any:
    """Return the product of rows that are grouped by experts: torch's own stand-in takes bfloat16 only, its
    kernels any type.
    """
    if left.dim() == right.dim() == 2:  # the gradient of the experts' weights
        return left.new_empty((offsets.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((left.shape[0], right.shape[-1]))


def _by_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool
