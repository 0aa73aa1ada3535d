"""Refuses torch's process group to reward functions in workers, which are no members of the rank's group.

A function that asks whether there is a group would skip its collective in a worker and return another reward;
one that opens a group would meet the store of the ranks. Both belong into the rank. `host.py` installs this
where the rank has a group, `_worker.py` makes it effective while a function runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REFUSED = ("is_initialized", "init_process_group")
"""Functions of torch.distributed. All others that need the group call the first one."""
_calling = False
_used = False


class ProcessGroupUsedError(BaseException):
    """A function has asked for the process group. No `Exception`, so that the function does not handle it."""


def install() -> None:
    """Wrap torch's functions in this process and in those that it forks. A second call has no effect."""
    import torch.distributed

    if not torch.distributed.is_available() or hasattr(torch.distributed.is_initialized, "__wrapped__"):
        return
    for name in REFUSED:
        wrapper = _refusing(getattr(torch.distributed, name))
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            setattr(module, name, wrapper)


@contextmanager
def refused() -> Iterator[None]:
    """Refuse the group in the block.

    Raises:
        ProcessGroupUsedError: it was asked for, also if the block has handled that and returned or raised.
    """
    global _calling, _used
    _calling, _used = True, False
    try:
        yield
    finally:
        _calling = False
        if _used:
            raise ProcessGroupUsedError


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        global _used
        if not _calling:
            return original(*args, **kwargs)
        _used = True
        raise ProcessGroupUsedError

    return refusing
