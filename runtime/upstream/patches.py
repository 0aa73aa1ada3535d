"""Temporary attribute overrides on a trainer, its arguments, its accelerator or its callbacks.

Called by `hooks` for the length of a `train()` call and by `saving` for the length of a save. Does not decide
what is overridden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def override_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object for the length of the block, then restore what the object had or inherited.

    Args:
        target: a class, or an object that stores its attributes in `__dict__`.
        values: the attributes to set, by name.
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
                with suppress(AttributeError):  # removed meanwhile
                    delattr(target, name)
