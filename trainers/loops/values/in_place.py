"""Set decoded values in the objects that a script has, so that its other references to these objects stay valid.

A list that is a value of the script's dictionary is usually a variable of the script, too. Objects that were one when the
values were saved are one again, and objects that were different do not become one because the script begins with the same
one for both. Called by `loops/rank_state.py`. Reads and writes no files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

MUTABLE = (list, dict, set, deque, torch.Tensor, np.ndarray)
SEPARATOR = "/"


def shared_objects(values: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of each object that occurs more than once in values."""
    found: dict[int, list[str]] = {}
    for path, value in _objects(values, ""):
        found.setdefault(id(value), []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]


def _objects(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MUTABLE) and path:
        yield path, value
    for key, item in _items(value):
        if isinstance(item, (*MUTABLE, tuple)):
            yield from _objects(item, _below(path, key))


def _items(value: Any) -> Iterable[tuple[Hashable, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, deque)) else ()


def _below(path: str, key: Hashable) -> str:
    return f"{path}{SEPARATOR}{key!r}"


class InPlace:
    """One restoration.

    Args:
        shared: result of `shared_objects` when the values were saved.
    """

    def __init__(self, shared: Iterable[Sequence[str]]) -> None:
        self._groups = {path: number for number, paths in enumerate(shared) for path in paths}
        self._restored: dict[int, Any] = {}
        self._used: set[int] = set()

    def set(self, present: Any, value: Any, path: str) -> Any:
        """Return what the script's dictionary is to hold: `present` with the content of `value`, if that is possible.

        Args:
            present: what the script has now; anything if it has nothing.
            value: decoded; not used afterwards.
            path: `key` of the entry, as `path_of` returns it.
        """
        group = self._groups.get(path)
        if group in self._restored and group is not None:
            return self._restored[group]
        if isinstance(present, MUTABLE):
            if id(present) in self._used:
                present = None
            else:
                self._used.add(id(present))
        result = self._fill(present, value, path)
        if group is not None:
            self._restored[group] = result
        return result

    def _fill(self, present: Any, value: Any, path: str) -> Any:
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            if present.shape == value.shape and present.dtype == value.dtype:
                with torch.no_grad():
                    present.copy_(value)
                return present
            return value
        if isinstance(present, np.ndarray) and isinstance(value, np.ndarray):
            if present.shape == value.shape and present.dtype == value.dtype and present.flags.writeable:
                present[...] = value
                return present
            return value
        if isinstance(present, np.generic) and isinstance(value, (bool, int, float)):
            return type(present)(value)
        if isinstance(value, dict):
            before: Mapping[Any, Any] = present if isinstance(present, dict) else {}
            items = {key: self.set(before.get(key), item, _below(path, key)) for key, item in value.items()}
            if not isinstance(present, dict):
                return items
            present.clear()
            present.update(items)
            return present
        if isinstance(value, (list, tuple, deque)):
            return self._fill_sequence(present, value, path)
        if isinstance(value, set) and isinstance(present, set):
            present.clear()
            present.update(value)
            return present
        return value

    def _fill_sequence(self, present: Any, value: Any, path: str) -> Any:
        same = (type(value) is tuple and isinstance(present, tuple)) or isinstance(present, type(value))
        before: Sequence[Any] = list(present) if same else ()
        items = [
            self.set(before[index] if index < len(before) else None, item, _below(path, index))
            for index, item in enumerate(value)
        ]
        if isinstance(value, tuple):
            named = same and hasattr(present, "_fields") and len(items) == len(present)
            return type(present)(*items) if named else tuple(items)
        if not same or (isinstance(value, deque) and present.maxlen != value.maxlen):
            return deque(items, value.maxlen) if isinstance(value, deque) else items
        present.clear()
        present.extend(items)
        return present


def path_of(key: str) -> str:
    """Return the path of an entry."""
    return _below("", key)
