"""How long the files of a checkpoint in torch's distributed format must be, from its `.metadata`.

That file is a pickle; it is read here with every class and function replaced by one that does nothing, so that
nothing of it is executed and torch is not needed. Called by `completeness.py`. Pure.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class Unreadable(Exception):
    """Not a pickle, cut short, or without what names the files."""


class _Inert(dict[Any, Any]):
    """Stands for whatever a pickle wants to make: takes all arguments and does nothing with them."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _: Any) -> None:
        """A list's."""

    def extend(self, _: Any) -> None:
        """A list's."""

    def add(self, _: Any) -> None:
        """A set's."""

    __hash__ = object.__hash__  # type: ignore[assignment] # it is the key of a dictionary in the format
    __eq__ = object.__eq__


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def file_sizes(metadata: bytes) -> dict[str, int]:
    """Name to size in bytes of every file that the checkpoint's tensors lie in.

    Raises:
        Unreadable: nothing can be said.
    """
    try:
        read = _Reader(io.BytesIO(metadata)).load()
        sizes: dict[str, int] = {}
        for info in read.storage_data.values():
            name, end = str(info.relative_path), int(info.offset) + int(info.length)
            sizes[name] = max(sizes.get(name, 0), end)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    if not sizes:
        raise Unreadable("it names no file")
    return sizes
