"""Autograd graphs of a model's calls that are kept for a part of a step and dropped without a backward pass.

Used by `tracer.py`. Nothing of them is left at the end of a step, but they make its peak: a generation without `torch.no_grad()` whose
results are only numbers. `DroppedGraphs` observes, `most_at_once` counts and is pure. Graphs are observed by weak references to what they
have saved, and by hooks at their beginning and end that note a backward pass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.rank.memory_trace.census import GraphWalk, storage_of
from grpo_run.runtime.rank.memory_trace.sites import Site, site_above

AT_ONCE = 8
"""Graphs that must be kept at once. A forward pass or a few without a backward pass may be a check, or a skipped loss."""
STEPS = 5
"""Steps in which that must happen."""
FIRST_STEPS = 2
"""Steps that do not count: a warm-up or a measurement."""
CALLS_A_STEP = 16
"""Calls of a step whose graphs are observed. A graph is walked once, which takes some ms for a model with 28 layers."""
MOST_OUTPUTS = 64
"""Tensors of one output."""
MOST_ENDS = 8
"""Nodes at the end of a graph that note a backward pass: one may begin at an activation within the model."""
OBSERVED = 4
"""Storages of a graph that are observed."""


@dataclass(eq=False, kw_only=True)
class CallGraph:
    """The graph of one call.

    Attributes:
        number: of the call in its step.
        last: the last call at whose end it was still there.
        bytes: what it has saved.
        output: of the call: shape and data type.
        site: the line of the script that called the model.
        used: a backward pass has run through it.
        saved: storages that it alone keeps, as long as no tensor of the script does.
    """

    number: int
    last: int
    bytes: int
    output: tuple[tuple[int, ...], str] = ((), "")
    site: Site | None = None
    used: bool = False
    saved: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """Whether something of it is still there."""
        return any(one() is not None for one in self.saved)

    def note_backward(self, *gradients: Any) -> None:
        """A backward pass reaches it."""
        self.used = True


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Graphs of one step that were dropped.

    Attributes:
        calls: whose graphs were there at once.
        bytes: what they had saved.
        step: in which it was seen first.
        steps: in how many it was seen.
        shape: of the last output, with its `dtype`.
        site: the line of the script that called the model.
    """

    calls: int
    bytes: int
    step: int
    steps: int
    shape: tuple[int, ...]
    dtype: str
    site: Site | None


def most_at_once(graphs: Iterable[CallGraph]) -> list[CallGraph]:
    """Return as many graphs as were there at once, without those that a backward pass has used or that are still there."""
    dropped = [one for one in graphs if not one.used and not one.is_alive]
    return max(
        ([one for one in dropped if one.number <= at.number <= one.last] for at in dropped),
        key=len,
        default=[],
    )


class DroppedGraphs:
    """Observes the graphs of the calls of models, step by step."""

    def __init__(self) -> None:
        self._graphs: list[CallGraph] = []
        self._previous: list[CallGraph] = []
        self._steps = 0
        self._seen: list[int] = []

    def called(self, model: Any, output: Any) -> None:
        """A model was called, by the script and not by another model, and has returned this."""
        number = len(self._graphs)
        torch = sys.modules["torch"]
        if number >= CALLS_A_STEP or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tensors = [one for one in _tensors(output, torch.Tensor) if one.grad_fn is not None][:MOST_OUTPUTS]
        if not tensors:
            return
        graph = CallGraph(
            number=number,
            last=number,
            bytes=0,
            output=(tuple(tensors[0].shape), str(tensors[0].dtype).removeprefix("torch.")),
            site=site_above(sys._getframe(2)),
        )
        walk = GraphWalk()
        own = {storage._cdata for one in tensors if (storage := storage_of(one)) is not None}
        # linear layers save views of their weights, which stay
        known = {storage._cdata for one in model.parameters() if (storage := storage_of(one)) is not None}
        for tensor in tensors:
            for saved in walk.saved(tensor.grad_fn):
                storage = storage_of(saved)
                if storage is None or storage._cdata in known:
                    continue
                known.add(storage._cdata)
                graph.bytes += storage.nbytes()
                if len(graph.saved) < OBSERVED and saved.is_floating_point() and storage._cdata not in own:
                    graph.saved.append(weakref.ref(storage))
        for node in [*{one.grad_fn for one in tensors}, *walk.ends(MOST_ENDS)]:
            node.register_prehook(graph.note_backward)
        self._graphs.append(graph)
        for one in self._graphs:
            if one.is_alive:
                one.last = number

    def step_ended(self, step: int) -> Dropped | None:
        """Return the graphs that were dropped, once that has happened in enough steps.

        Those of the step before count: until then a variable of the script may have the results.
        """
        graphs, self._previous, self._graphs = self._previous, self._graphs, []
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            return None
        dropped = most_at_once(graphs)
        if len(dropped) < AT_ONCE:
            return None
        self._seen.append(step)
        if len(self._seen) < STEPS:
            return None
        shape, dtype = dropped[-1].output
        return Dropped(
            calls=len(dropped), bytes=sum(one.bytes for one in dropped), step=self._seen[0], steps=len(self._seen),
            shape=shape, dtype=dtype, site=dropped[-1].site,
        )  # fmt: skip


def _tensors(output: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors of an output: itself, or in mappings, lists and tuples."""
    if isinstance(output, kind):
        yield output
    elif depth < 3 and isinstance(output, (dict, list, tuple)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _tensors(part, kind, depth + 1)
