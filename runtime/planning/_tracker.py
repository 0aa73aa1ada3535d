"""Record every allocation of traced code, with the phase in which it was made and what it holds.

Used by `_trace.py` around fake tensors, which have sizes but no data. Two kinds of operators need data and
get a stand-in: reading a number (`.item()`), and selecting by a mask, whose number of selected positions the
caller says.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from grpo_run.runtime.planning.timeline import AllocationTimeline, Mark
from grpo_run.runtime.upstream.dispatch_modes import TorchDispatchMode, tree_leaves

_KIND_OF_PHASE = {"load": "weights", "inputs": "rollout", "optimizer": "optimizer"}


class AllocationTracker(TorchDispatchMode):
    """Dispatch mode that writes a timeline.

    Attributes:
        timeline: written so far.
        selected: how many positions a mask selects, for operators whose result depends on it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.timeline = AllocationTimeline()
        self.selected = 0
        self._alive: dict[int, int] = {}
        self._kind = "activations"
        self.begin("load", -1)

    def begin(self, phase: str, step: int, window: int = 0) -> None:
        """Say which phase of which step begins; `window` numbers the parts of a phase that is interrupted."""
        self._kind = _KIND_OF_PHASE.get(phase, "activations")
        self.timeline.marks.append(
            Mark(event=len(self.timeline.events), step=step, phase=phase, window=window)
        )

    def _begin_window(self) -> None:
        last, event = self.timeline.marks[-1], len(self.timeline.events)
        self.timeline.marks.append(replace(last, event=event, window=last.window + 1))

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Record of what is allocated inside only what is alive afterwards, as if it had just been
        allocated.
        """
        events = self.timeline.events
        start = len(events)
        yield
        freed = {~event for event in events[start:] if event < 0}
        made = {event for event in events[start:] if event >= 0}
        events[start:] = [
            event for event in events[start:] if (event if event >= 0 else ~event) not in freed & made
        ]

    @contextlib.contextmanager
    def holding(self, kind: str) -> Iterator[None]:
        """Count what is allocated inside as a kind, and look for its peak apart from the rest of the
        phase.
        """
        before, self._kind = self._kind, kind
        self._begin_window()
        try:
            yield
        finally:
            self._kind = before
            self._begin_window()

    def classify(self, tensors: Iterable[Any], kind: str) -> None:
        """Say afterwards what tensors hold."""
        for tensor in tensors:
            number = self._alive.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.timeline.kinds[number] = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record the storages of its results."""
        result = self._stand_in(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._record(leaf.untyped_storage())
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

    def _record(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._alive:
            return
        number = len(self.timeline.sizes)
        self.timeline.sizes.append(storage.nbytes())
        self.timeline.kinds.append(self._kind)
        self.timeline.events.append(number)
        self._alive[key] = number
        weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.timeline.events.append(~self._alive.pop(key))


def _grouped_product(left: Any, right: Any, offsets: Any) -> Any:
    """Return the product of rows that are grouped by experts: torch's own stand-in takes bfloat16 only, its
    kernels any type.
    """
    if left.dim() == right.dim() == 2:  # the gradient of the experts' weights
        return left.new_empty((offsets.shape[0], left.shape[0], right.shape[1]))
    return left.new_empty((left.shape[0], right.shape[-1]))


def _by_mask(indices: Any) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool
