"""What is alive in this process, and since when: tensors, and what graphs have saved.

Used by `_tracer.py` between two steps. One pass over the objects that `gc` tracks finds the tensors that
Python holds; objects that existed before the fork are frozen, so a pass takes milliseconds. Tensors saved
for backward are invisible to `gc`: they are reached through `grad_fn`, and no hook runs and nothing is
unpacked. A census holds nothing once the caller has dropped it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.features.memory_trace.events import Site
from grpo_run.runtime.upstream.memory_names import saved_by

MOST_NODES = 200_000
"""Nodes of one census. A pass of a model has about 50 for each layer; a walk takes 1 to 2 µs for a node."""
FIRST_STEPS = 2
"""Steps in which memory grows in every script: state of the optimizer, caches, buffers of gradients."""
WITHOUT_DATA = ("torch._subclasses", "torch.fx", "torch._functorch", "torch._higher_order_ops")
"""Modules whose classes of tensors have no data."""
SMALLEST_BYTES = 128
"""Storages below are not followed: numbers, and the losses of a script that keeps a list of them."""


@dataclass(kw_only=True)
class Census:
    """What is alive now. Holds it, so drop it before the next step.

    Attributes:
        tensors: by storage, the tensors that Python holds.
        storages: by key.
        graphs: by the node in which they begin, tensors with a graph, each with what the graph has saved, by
            storage. Each node belongs to one of them. Looking at what is saved makes Python objects of it,
            which later censuses find among the tensors.
    """

    tensors: dict[int, list[Any]] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)
    graphs: dict[Any, tuple[Any, dict[int, Any]]] = field(default_factory=dict)

    def identities(self) -> set[int]:
        """Return the ids of the objects of this census that refer to what is alive."""
        own = {id(self), id(self.__dict__), *map(id, self.__dict__.values()), *map(id, self.tensors.values())}
        return own.union(*((id(pair), id(pair[1])) for pair in self.graphs.values()))

    def held(self, tensors: Collection[Any], *, saved: bool = True) -> set[int]:
        """Return the storages of tensors, and what their graphs have saved.

        Args:
            saved: also the latter.
        """
        storages = map(storage_of, tensors)
        own = {storage._cdata for storage in storages if storage is not None}
        known = set(map(id, tensors)) if saved else set()
        return own.union(*(kept for root, kept in self.graphs.values() if id(root) in known))

    def above(self, key: int) -> list[Any]:
        """Return the tensors through which a storage is held: those whose graph has saved it, and its own."""
        roots = [root for root, kept in self.graphs.values() if key in kept]
        known = {id(root) for root in roots}
        return roots + [one for one in self.tensors.get(key, ()) if id(one) not in known]


def tensor_types(torch: Any) -> frozenset[type]:
    """Return the classes of tensors that have memory of their own, without those that wrap others."""
    found: set[type] = set()
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        waiting.extend(set(type.__subclasses__(kind)) - found)
        found.add(kind)
    return frozenset(
        kind
        for kind in found
        if not hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith(WITHOUT_DATA)
    )


def take_census(kinds: frozenset[type]) -> Census:
    """Find what is alive.

    Args:
        kinds: classes of tensors.
    """
    census = Census()
    with_graph: list[Any] = []
    for candidate in gc.get_objects():
        if type(candidate) in kinds:
            storage = storage_of(candidate)
            if storage is not None:
                census.storages.setdefault(storage._cdata, storage)
                census.tensors.setdefault(storage._cdata, []).append(candidate)
            if candidate.grad_fn is not None:
                with_graph.append(candidate)
    walked: set[Any] = set()
    for root in with_graph:
        _walk_graph(root, kinds, walked, census)
    return census


def _walk_graph(root: Any, kinds: frozenset[type], walked: set[Any], census: Census) -> None:
    """Enter what the graph of a tensor has saved.

    A graph that begins within this one is a part of it, and so is that of a tensor that this one has saved:
    nothing else may hold it.
    """
    kept: dict[int, Any] = {}
    waiting = [root.grad_fn]
    while waiting and len(walked) < MOST_NODES:
        node = waiting.pop()
        if node is None:
            continue
        if node in walked:
            kept |= census.graphs.pop(node, (None, {}))[1]
            continue
        walked.add(node)
        waiting.extend(after for after, _ in node.next_functions)
        for saved in saved_by(node):
            if type(saved) not in kinds:
                continue
            waiting.append(saved.grad_fn)
            storage = storage_of(saved)
            if storage is not None and not (saved.is_leaf and saved.requires_grad):
                census.storages.setdefault(storage._cdata, storage)
                kept[storage._cdata] = saved
    if kept:
        census.graphs[root.grad_fn] = root, kept


def storage_of(tensor: Any) -> Any:
    """Return the storage of a tensor if it has data worth following; None otherwise."""
    try:
        if tensor.is_meta or tensor.is_sparse:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() >= SMALLEST_BYTES else None
    except (RuntimeError, NotImplementedError):  # no storage, as of a functional or an opaque tensor
        return None


@dataclass(kw_only=True)
class StorageEntry:
    """One storage, which is held weakly.

    Attributes:
        born: the step at whose end it was first seen.
        device: its type, such as `cuda`.
        site: where it was made; None if that was not recorded.
        settled: whether what holds it was looked for.
    """

    reference: weakref.ref[Any]
    key: int
    born: int
    bytes: int
    device: str
    dtype: str
    shape: tuple[int, ...]
    site: Site | None
    settled: bool = False


class Ledger:
    """The storages of a process that were alive at the end of a step.

    What is as old as the first census, or was made in the first steps, belongs to the script's start.
    """

    def __init__(self) -> None:
        self._first = 0
        self._entries: dict[int, StorageEntry] = {}

    def observe(self, step: int, census: Census, site_of: Callable[[int], Site | None]) -> None:
        """Enter what is new in a census, and drop what has been freed.

        Args:
            step: the step that has ended.
            site_of: returns where a storage of this step was made, if that was recorded.
        """
        self._first = self._first or step
        alive = {key: one for key, one in self._entries.items() if one.reference() is not None}
        for key, storage in census.storages.items():
            if key not in alive:
                saved = (kept[key] for _, kept in census.graphs.values() if key in kept)
                shown = max(census.tensors.get(key) or [next(saved)], key=lambda tensor: int(tensor.numel()))
                alive[key] = StorageEntry(
                    reference=weakref.ref(storage), key=key, born=step, bytes=storage.nbytes(),
                    device=shown.device.type, dtype=str(shown.dtype).removeprefix("torch."),
                    shape=tuple(shown.shape), site=site_of(key),
                )  # fmt: skip
        self._entries = alive

    def later(self, keys: Iterable[int] | None = None) -> list[StorageEntry]:
        """Return what was made after the first steps.

        Args:
            keys: of storages; all by default.
        """
        entries = map(self._entries.get, self._entries if keys is None else keys)
        return [one for one in entries if one is not None and one.born >= self._first + FIRST_STEPS]
