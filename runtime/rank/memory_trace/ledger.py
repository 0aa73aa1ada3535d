"""The ledger of a memory trace: which storages are alive, and since which step.

Used by `tracer.py`. Storages are held weakly: an entry goes when its storage is freed. Steps are those of the censuses, so a
storage was born in the step after whose end it was seen first.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from grpo_run.runtime.rank.memory_trace.census import Census, Group, group_of
from grpo_run.runtime.rank.memory_trace.sites import Site


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
        first: the step of the first census. What is as old belongs to the script's start.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._entries: dict[int, StorageEntry] = {}

    def observe(self, step: int, census: Census, sites: dict[int, Site]) -> None:
        """Enter what is new in a census.

        Args:
            step: the step that has ended.
            sites: where storages of this step were made, as far as it was recorded.
        """
        if self.first is None:
            self.first = step
        entries = self._entries
        for key, storage in census.storages.items():
            if key in entries:
                continue
            tensors = census.tensors.get(key)
            if tensors is not None:
                shown = max(tensors, key=_size)
            else:
                shown = next(kept[key] for _, kept in census.graphs if key in kept)
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

    def __len__(self) -> int:
        return len(self._entries)

    def _freed(self, entry: weakref.ref[Any]) -> None:
        assert isinstance(entry, StorageEntry)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]


def _size(tensor: Any) -> int:
    return int(tensor.numel())
