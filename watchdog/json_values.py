"""JSON values of frozen dataclasses whose JSON form has their own fields, and the way back.

Called where such a value is journaled, printed, sent to another host or read from a file. Classes with
another public form have a method `as_json` of their own. Reads and writes no file.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, TypeVar

import pydantic

Value = TypeVar("Value")


def to_json(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain JSON values."""
    fields: dict[str, Any] = _adapter(type(value)).dump_python(value, mode="json")
    return fields


def from_json(kind: type[Value], value: object) -> Value:
    """Return what `to_json` was given; unknown fields are ignored.

    Raises:
        ValueError: `value` has another format.
    """
    found: Value = _adapter(kind).validate_python(value)
    return found


MAX_UNPACKED_BYTES = 64 * 1024 * 1024


def pack(value: Any) -> bytes:
    """Return a value as compressed JSON text, to be sent. A thousand collective records take some KB."""
    return zlib.compress(json.dumps(to_json(value), separators=(",", ":")).encode(), 1)


def unpack(kind: type[Value], packed: bytes) -> Value:
    """Return what `pack` was given.

    Raises:
        ValueError: it has another format, or is too long.
    """
    try:
        text = zlib.decompressobj().decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return from_json(kind, json.loads(text))


_adapters: dict[type, pydantic.TypeAdapter[Any]] = {}


def _adapter(kind: type) -> pydantic.TypeAdapter[Any]:
    if kind not in _adapters:  # a few milliseconds for each class
        _adapters[kind] = pydantic.TypeAdapter(kind)
    return _adapters[kind]
