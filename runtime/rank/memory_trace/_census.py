"""What is alive in this process, and since when: tensors, what graphs have saved, and old tracebacks.

Used by `tracer.py` between two steps. One pass over the objects that `gc` tracks finds the tensors that
Python holds; objects that existed before the fork are frozen, so a pass takes milliseconds. Tensors saved
for backward are invisible to `gc`: `saved_above` follows `grad_fn` and `next_functions`, and runs no hook and
unpacks nothing. A census holds nothing once the caller has dropped it; `Ledger` holds storages weakly.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from grpo_run.runtime.upstream.memory_names import saved_by

MOST_NODES = 200_000
"""Nodes of one census. A pass of a model has about 50 for each layer; a walk takes 1 to 2 µs for a node."""


def inner_nodes(grad_fns: Iterable[Any]) -> set[Any]:
    """Return the nodes that are reached from others: a graph that begins there is a part of another."""
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


def saved_above(grad_fn: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield each tensor that the graph above a node has saved.

    Args:
        seen: nodes that are left out, because they were reached before; those that are reached are added.
    """
    waiting = [grad_fn]
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield from saved_by(node)
            waiting.extend(after for after, _ in node.next_functions)


WITHOUT_DATA = ("torch._subclasses", "torch.fx", "torch._functorch", "torch._higher_order_ops")
"""Modules whose classes of tensors have no data."""
SMALLEST_BYTES = 128
"""Storages below are not followed: numbers, and the losses of a script that keeps a list of them."""


class Group(NamedTuple):
    """Storages that are looked at together until their holder is known."""

    dtype: str
    dimensions: int


@dataclass(kw_only=True)
class Census:
    """What is alive now. Holds it, so drop it before the next step.

    Attributes:
        tensors: by storage, the tensors that Python holds.
        storages: by key.
        graphs: tensors with a graph, each with what the graph has saved, by storage. Each node belongs to one
            of them. Looking at what is saved makes Python objects of it, which later censuses find among the
            tensors.
        tracebacks: of exceptions that were kept.
    """

    tensors: dict[int, list[Any]] = field(default_factory=dict)
    storages: dict[int, Any] = field(default_factory=dict)
    graphs: list[tuple[Any, dict[int, Any]]] = field(default_factory=list)
    tracebacks: list[TracebackType] = field(default_factory=list)

    def identities(self) -> set[int]:
        """Return the ids of the objects of this census that refer to what is alive."""
        own = {id(self), id(self.__dict__), *map(id, self.__dict__.values()), *map(id, self.tensors.values())}
        return own.union(*((id(pair), id(pair[1])) for pair in self.graphs))


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
        kind = type(candidate)
        if kind in kinds:
            storage = storage_of(candidate)
            if storage is not None:
                census.storages.setdefault(storage._cdata, storage)
                census.tensors.setdefault(storage._cdata, []).append(candidate)
            if candidate.grad_fn is not None:
                with_graph.append(candidate)
        elif kind is TracebackType:
            census.tracebacks.append(candidate)
    census.graphs = _graphs_of(with_graph, kinds, census.storages)
    return census


def _graphs_of(
    roots: list[Any], kinds: frozenset[type], storages: dict[int, Any]
) -> list[tuple[Any, dict[int, Any]]]:
    """Return what the graphs of tensors have saved, and add the storages to those that are known.

    A root within another one's graph, or that this has saved, is no holder: what its graph has saved belongs
    to the other one. Looking at what is saved makes Python objects of it and of what it is a view of, which
    nothing in Python may hold.
    """
    walked: set[Any] = set()
    inner = inner_nodes(root.grad_fn for root in roots)
    roots = [root for root in roots if root.grad_fn not in inner]
    kept = {id(root): dict[int, Any]() for root in roots}
    saved_by: dict[int, int] = {}
    for root in roots:
        for saved in saved_above(root.grad_fn, walked):
            if type(saved) not in kinds:
                continue
            if id(saved) in kept and saved is not root:
                saved_by.setdefault(id(saved), id(root))
            storage = storage_of(saved)
            if storage is not None and not (saved.is_leaf and saved.requires_grad):
                storages.setdefault(storage._cdata, storage)
                kept[id(root)][storage._cdata] = saved
    for saved_one in saved_by:
        outermost, passed = saved_one, {saved_one}
        while (outer := saved_by.get(outermost)) is not None and outer not in passed:
            passed.add(outer)
            outermost = outer
        if outermost != saved_one:
            kept[outermost].update(kept[saved_one])
            kept[saved_one] = {}
    return [(root, kept[id(root)]) for root in roots if kept[id(root)]]


def storage_of(tensor: Any) -> Any:
    """Return the storage of a tensor if it has data worth following; None otherwise."""
    try:
        if tensor.is_meta or tensor.is_sparse:
            return None
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() >= SMALLEST_BYTES else None
    except (RuntimeError, NotImplementedError):  # no storage, as of a functional or an opaque tensor
        return None


def group_of(tensor: Any) -> Group:
    """Return the group of a tensor."""
    return Group(_name(tensor.dtype), tensor.dim())


@functools.lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


class Site(NamedTuple):
    """A line of the script, and the line of a library below it that has made something."""

    file: str
    line: int
    function: str
    library_file: str | None = None
    library_line: int | None = None


class StorageEntry(weakref.ref[Any]):
    """One storage."""

    __slots__ = ("born", "bytes", "device", "group", "key", "settled", "shape", "site")
    born: int
    bytes: int
    device: str
    """Its type, such as `cuda`."""
    group: Group
    key: int
    settled: bool
    """Whether it is known what holds it, and judged."""
    shape: tuple[int, ...]
    site: Site | None
    """Where it was made; None if that was not recorded."""


class Ledger:
    """The storages of a process that were alive at the end of a step.

    Attributes:
        first: the step of the first census, 0 before it. What is as old belongs to the script's start.
    """

    def __init__(self) -> None:
        self.first = 0
        self._entries: dict[int, StorageEntry] = {}

    def observe(self, step: int, census: Census, sites: dict[int, Site]) -> None:
        """Enter what is new in a census.

        Args:
            step: the step that has ended.
            sites: where storages of this step were made, as far as it was recorded.
        """
        self.first = self.first or step
        entries = self._entries
        for key, storage in census.storages.items():
            if key in entries:
                continue
            saved = (kept[key] for _, kept in census.graphs if key in kept)
            shown = max(census.tensors.get(key) or [next(saved)], key=lambda tensor: int(tensor.numel()))
            entry = StorageEntry(storage, self._freed)
            entry.key, entry.born, entry.bytes = key, step, storage.nbytes()
            entry.shape, entry.settled = tuple(shown.shape), False
            entry.group, entry.device = group_of(shown), shown.device.type
            entry.site = sites.get(key)
            entries[key] = entry

    def of(self, keys: Iterable[int]) -> list[StorageEntry]:
        """Return the entries of storages that are in the ledger."""
        return [self._entries[key] for key in keys if key in self._entries]

    def made_in(self, step: int) -> list[StorageEntry]:
        """Return what a step has made."""
        return [one for one in list(self._entries.values()) if one.born == step]

    def groups(self) -> Iterator[tuple[Group, list[StorageEntry]]]:
        """Yield entries that no judged holder holds, by group."""
        groups: dict[Group, list[StorageEntry]] = defaultdict(list)
        for entry in list(self._entries.values()):
            if not entry.settled:
                groups[entry.group].append(entry)
        yield from groups.items()

    def _freed(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, StorageEntry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
