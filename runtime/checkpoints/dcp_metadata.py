"""Expected file sizes of a torch distributed checkpoint, read from its `.metadata` file.

`.metadata` is a pickle. It is read with every class and function replaced by an inert object, so no code in
it runs and torch is not imported. Called by `file_checks.py`. Pure.
"""

from __future__ import annotations

import io
import pickle
from typing import Any


class UnreadableMetadataError(Exception):
    """The metadata is not a complete pickle, or does not name any files."""


class _Inert(dict[Any, Any]):
    """Replacement for every object in the pickle: accepts all arguments and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)

    def append(self, _: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, _: Any) -> None:
        """Ignore the items of a list."""

    def add(self, _: Any) -> None:
        """Ignore an item of a set."""

    __hash__ = object.__hash__  # type: ignore[assignment] # the format uses it as a dictionary key
    __eq__ = object.__eq__


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_file_sizes(metadata: bytes) -> dict[str, int]:
    """Return the size in bytes of every data file, by name.

    Args:
        metadata: the contents of `.metadata`.

    Raises:
        UnreadableMetadataError: the sizes cannot be determined.
    """
    try:
        content = _InertUnpickler(io.BytesIO(metadata)).load()
        sizes: dict[str, int] = {}
        for info in content.storage_data.values():
            name, end = str(info.relative_path), int(info.offset) + int(info.length)
            sizes[name] = max(sizes.get(name, 0), end)
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise UnreadableMetadataError(f"{type(error).__name__}: {error}") from None
    if not sizes:
        raise UnreadableMetadataError("it names no file")
    return sizes
