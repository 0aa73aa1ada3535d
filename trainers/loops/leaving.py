"""Whether an iterator is discarded because a loop was left on purpose (`break`, `return`), or by an exception.

Python calls `__del__` of an iterator in either case, and says nothing about an exception that is still on its way. But
the statement that is being executed tells: after `break` and `return` the interpreter discards the iterator by an
instruction of its own, and such an instruction raises nothing. A generator between the iterator and the loop, as a
progress bar is, is closed at its `yield`; then its caller tells. Called by `steps.py`. Reads frames and changes nothing.
"""

from __future__ import annotations

import dis
import inspect
from types import FrameType

DISCARDING = frozenset({"POP_TOP", "POP_ITER"})
"""Instructions that discard the iterator of a `for` after `break` and `return`, in Python 3.10 to 3.14. With an
instruction that is not known here, a loop counts as left by an exception."""
SUSPENDED = frozenset({"YIELD_VALUE", "RESUME"})
"""Instructions at which a generator is when it is closed."""


def discarded_on_purpose(frame: FrameType | None) -> bool:
    """Return whether a loop was left by `break` or `return`.

    Args:
        frame: in which the iterator's `__del__` was called.
    """
    while (
        frame is not None
        and frame.f_code.co_flags & inspect.CO_GENERATOR
        and _instruction(frame) in SUSPENDED
    ):
        frame = frame.f_back
    return frame is not None and _instruction(frame) in DISCARDING


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
