"""JSON values of frozen dataclasses whose JSON form has their own fields, and the way back.

Called where such a value is journaled, printed or read from a file. Classes with another public form have a
method `as_json` of their own. Reads and writes no file.
"""

from __future__ import annotations

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


_adapters: dict[type, pydantic.TypeAdapter[Any]] = {}


def _adapter(kind: type) -> pydantic.TypeAdapter[Any]:
    if kind not in _adapters:  # a few milliseconds for each class
        _adapters[kind] = pydantic.TypeAdapter(kind)
    return _adapters[kind]
