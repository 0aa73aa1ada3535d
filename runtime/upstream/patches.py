"""Temporary attribute overrides on a trainer, its arguments, its accelerator or its callbacks.

Called by `runtime/rank/hooks/` and `runtime/rank/rollouts/` for the length of a `train()` call, and by
`runtime/rank/saving/` for the length of a save. Does not decide what is overridden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
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


Handler = Callable[..., Any]
"""Takes the method that it is called around as its first argument, `original`, and then what the method
takes.
"""


def noting(note: Callable[[Any], None]) -> Handler:
    """Return a handler that notes what a method returns."""

    def noted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result)
        return result

    return noted


@contextmanager
def wrapped_methods(target: Any, handlers: Mapping[str, Sequence[Handler | None]]) -> Iterator[None]:
    """Call handlers around methods of an object for the length of the block.

    Args:
        handlers: by method, from the outside in: the first handler gets the second as its `original`, and the
            last one the method itself. None is left out, and so is a method that the object lacks.
    """
    wrapped: dict[str, Any] = {}
    for name, around in handlers.items():
        original = method = getattr(target, name, None)
        for handler in reversed(around):
            if method is not None and handler is not None:
                method = functools.wraps(method)(functools.partial(handler, method))
        if method is not original:
            wrapped[name] = method
    with override_attributes(target, **wrapped):
        yield
