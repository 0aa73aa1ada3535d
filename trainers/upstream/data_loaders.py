"""Private names of torch's `DataLoader`.

Used by `loops` to continue within an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced_batch_sampler(loader: Any, sampler: Any) -> Iterator[None]:
    """Let the iterators that a `DataLoader` makes within the block use another batch sampler.

    `DataLoader` keeps it in an attribute that it refuses to set again, and reads it when it makes an iterator.
    """
    own = vars(loader)["batch_sampler"]
    vars(loader)["batch_sampler"] = sampler
    try:
        yield
    finally:
        vars(loader)["batch_sampler"] = own
