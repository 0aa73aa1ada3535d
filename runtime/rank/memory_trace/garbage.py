"""Python's automatic collection of garbage, postponed for a moment.

Used where the trace holds what it looks at, and where code must not be interrupted by other code. Changes no threshold.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collections_postponed() -> Iterator[None]:
    """Let Python collect no garbage on its own within the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
