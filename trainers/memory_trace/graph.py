"""What the autograd graph of a tensor keeps alive. Tensors that were saved for backward are invisible to `gc`.

Used by `census.py`. Walks `grad_fn` and `next_functions`; runs no hook and unpacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from grpo_run.trainers.upstream.memory_names import saved_by

MOST_NODES = 200_000
"""Nodes of one census. A pass of a model has about 50 for each layer; a walk takes 1 to 2 µs for a node."""


def inner_nodes(grad_fns: Iterable[Any]) -> set[Any]:
    """Return the nodes that are reached from others of these graphs: a graph that begins at one of them is a part of another."""
    inner: set[Any] = set()
    begun: set[Any] = set()
    for start in grad_fns:
        if start in begun or start in inner:
            continue
        begun.add(start)
        waiting = [start]
        while waiting and len(inner) < MOST_NODES:
            for node, _ in waiting.pop().next_functions:
                if node is None or node in inner:
                    continue
                inner.add(node)
                if node not in begun:
                    waiting.append(node)
    return inner


class GraphWalk:
    """One walk over the graphs of several tensors. Nodes that were reached before are left out."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._ends: list[Any] = []

    @property
    def nodes(self) -> int:
        """How many nodes were reached."""
        return len(self._seen)

    def saved(self, grad_fn: Any) -> Iterator[Any]:
        """Yield each tensor that the graph above this node has saved."""
        waiting = [grad_fn]
        seen = self._seen
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            yield from saved_by(node)
            following = [after for after, _ in node.next_functions if after is not None]
            if following and not any(after.next_functions for after in following):
                self._ends.append(node)
            waiting.extend(following)

    def ends(self, most: int) -> list[Any]:
        """Return nodes that lead to parameters only. The last ones were reached last."""
        return self._ends[-most:]
