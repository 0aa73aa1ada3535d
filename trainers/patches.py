"""Attributes of a trainer or its arguments that are others while it saves for us.

Called by `saver.py` and `snapshots.py`; does not know which, nor why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **values: Any) -> Iterator[None]:
    """Give an object attributes of its own while the block runs; what it had, or inherited, is there again after.

    Args:
        target: an object that keeps its attributes in `__dict__`.
        values: by name.
    """
    own = {name: vars(target)[name] for name in values if name in vars(target)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(target, name, own[name])
            else:
                vars(target).pop(name, None)
