"""What the autograd graph of a tensor keeps alive. Tensors that were saved for backward are invisible to `gc`.

Used by `census.py`. Walks `grad_fn` and `next_functions`; runs no hook and unpacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_run.trainers.upstream.memory_names import saved_by

MOST_NODES = 200_000
"""Nodes of one census. A pass of a model has about 50 for each layer; a walk takes 1 to 2 µs for a node."""


class GraphWalk:
    """One walk over the graphs of several tensors. Nodes that were reached before are left out."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

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
            waiting.extend(following for following, _ in node.next_functions)
