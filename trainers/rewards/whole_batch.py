"""`@whole_batch`: a reward function that must not be called with a part of a batch. For scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
_MARK = "__grpo_run_whole_batch__"


def whole_batch(function: Function) -> Function:
    """Mark a reward function that compares the completions of a batch with one another.

    After a failure, a function is called again with parts of its batch, to find the samples that it fails on. Parts of a
    batch would change the rewards of such a function; all samples of the failed call are excluded instead.

    Args:
        function: a reward function as TRL calls it. Returned itself; the mark has no effect outside the reward service.
    """
    setattr(function, _MARK, True)
    return function


def needs_whole_batch(function: object) -> bool:
    """Whether a reward function is marked with `whole_batch`."""
    return bool(getattr(function, _MARK, False))
