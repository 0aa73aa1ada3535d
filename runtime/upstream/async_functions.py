"""Asynchronous functions of a script: detect them, and limit the time of one call.

Called where reward functions and tools are wrapped. Imports no training
library.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable
from typing import Any


def is_coroutine_function(function: Any) -> bool:
    """Return whether calling a function returns a coroutine; also for partial functions and objects that can
    be called.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - whether calling it returns a coroutine
    )


async def finished_within(awaitable: Awaitable[Any], seconds: float) -> asyncio.Future[Any] | None:
    """Return the finished task of a call; None if the call was late and has been cancelled.

    Unlike `asyncio.wait_for`, it does not wait for a function that suppresses its cancellation, and a
    `TimeoutError` of the function itself is not taken for a late call.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if done:
        return task
    task.cancel()
    return None
