"""Which functions a trainer awaits, and the time limit of one call."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from grpo_run.runtime.upstream.async_functions import finished_within, is_coroutine_function


class Judge:
    """A callable object that is awaited."""

    async def __call__(self) -> None:
        await asyncio.sleep(0)


async def look_up() -> None:
    """An asynchronous function."""


@pytest.mark.parametrize(
    ("function", "awaited"),
    [
        (look_up, True),
        (functools.partial(look_up), True),
        (Judge(), True),
        (functools.partial(Judge()), True),
        (len, False),
        (functools.partial(len), False),
        (lambda: None, False),
    ],
)
def test_what_is_awaited(function: Any, awaited: bool) -> None:
    """As TRL and Python decide it, through partial functions."""
    assert is_coroutine_function(function) is awaited


def test_an_error_of_the_function_itself_is_no_late_call() -> None:
    """It may have time limits of its own."""

    async def expires() -> None:
        raise TimeoutError("of its own")

    async def run() -> None:
        task = await finished_within(expires(), 5.0)
        assert task is not None
        with pytest.raises(TimeoutError, match="of its own"):
            task.result()

    asyncio.run(run())


def test_a_caller_that_is_cancelled_cancels_the_call() -> None:
    """Nothing goes on in the background."""

    async def run() -> bool:
        cancelled = asyncio.Event()

        async def waits() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        outer = asyncio.ensure_future(finished_within(waits(), 30.0))
        await asyncio.sleep(0.01)
        outer.cancel()
        await asyncio.wait({outer})
        await asyncio.wait_for(cancelled.wait(), 5.0)
        return outer.cancelled()

    assert asyncio.run(run())
