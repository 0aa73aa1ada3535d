"""Wraps the reward functions of a trainer: marks their phase on the board, and counts calls and completions.

Called by `_rollout_hooks.py` for each guarded `train()` call. A function is wrapped once and stays so,
because the script may call it between two `train()` calls. A wrapper keeps the function's name, which TRL
uses as a metric name, and its kind (coroutine or not). In the rank a function is called through
`called_in_rank`, by which a stack shows which one hangs (`watchdog/diagnosis/_rewards.py`); a feature may
call something in its place. Latencies go to the journal periodically. Reward models are left alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.history.totals import RewardCalls
from grpo_run.runtime.rank.points import RewardWrapper
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.watchdog.observation import Phase

WRITE_SECONDS = 60.0
"""Time between two events of one function."""
_CALLS = "_grpo_run_calls"
"""Attribute of a wrapper."""


class FunctionCalls:
    """Counts the calls of one function in this rank and attempt, and writes the totals so far.

    Args:
        name: of the function.
        session: of the rank.
    """

    def __init__(self, name: str, session: Session) -> None:
        self._name = name
        self._session = session
        self._calls = self._written_calls = 0
        self._total_seconds = self._longest_seconds = 0.0
        self._write_at = time.perf_counter()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time one call, also one that fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._calls += 1
            self._total_seconds += now - began
            self._longest_seconds = max(self._longest_seconds, now - began)
            if now >= self._write_at:
                self.write()

    def scored(self, result: Any) -> Any:
        """Count the completions that a call has scored, and return its result."""
        slot = self._session.slot
        if hasattr(result, "__len__"):
            slot.rewards_scored += len(result)
        slot.publish()
        return result

    def write(self) -> None:
        """Write the totals, if there were calls since the last time."""
        session = self._session
        self._write_at = time.perf_counter() + WRITE_SECONDS
        if self._calls == self._written_calls or not session.is_rank:
            return
        self._written_calls = self._calls
        session.journal.write(
            RewardCalls(
                rank=session.rank,
                step=session.slot.step + 1,
                function=self._name,
                calls=self._calls,
                total_seconds=round(self._total_seconds, 6),
                longest_seconds=round(self._longest_seconds, 6),
            )
        )


@contextmanager
def rewards_wrapped(trainer: Any, session: Session, features: Sequence[RewardWrapper]) -> Iterator[None]:
    """Wrap the reward functions of a trainer; at the end of the block, write what they have counted.

    Args:
        features: return what is called in place of a function, from the inside out.
    """
    functions = getattr(trainer, "reward_funcs", None)
    if not isinstance(functions, list):
        yield
        return
    functions[:] = [wrapped(function, session, features) for function in functions]
    try:
        yield
    finally:
        for function in functions:
            if (calls := getattr(function, _CALLS, None)) is not None:
                calls.write()


def wrapped(function: Any, session: Session, features: Sequence[RewardWrapper] = ()) -> Any:
    """Return a wrapped reward function. Reward models (modules) and functions that are wrapped already are
    returned unchanged.
    """
    if (
        not callable(function)
        or isinstance(function, type)
        or hasattr(function, "forward")
        or hasattr(function, _CALLS)
    ):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    calls = FunctionCalls(name, session)

    def replaced(call: Callable[..., Any]) -> Callable[..., Any]:
        for feature in features:
            call = feature(function, name, call)
        return call

    if is_coroutine_function(function):
        wrapper = _marked_async(replaced(_called_async(function)), calls)
    else:
        wrapper = _marked(replaced(_called(function)), calls, session.slot)
    functools.update_wrapper(wrapper, function)
    wrapper.__name__ = name
    setattr(wrapper, _CALLS, calls)
    return wrapper


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    def called_in_rank(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return called_in_rank


def _called_async(function: Callable[..., Any]) -> Callable[..., Any]:
    async def called_in_rank(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return called_in_rank


def _marked(call: Callable[..., Any], calls: FunctionCalls, slot: SlotWriter) -> Callable[..., Any]:
    def marked_call(*args: Any, **kwargs: Any) -> Any:
        with calls.timed():
            try:
                slot.enter(Phase.reward)
                return calls.scored(call(*args, **kwargs))
            finally:
                slot.leave(Phase.reward)

    return marked_call


def _marked_async(call: Callable[..., Any], calls: FunctionCalls) -> Callable[..., Any]:
    async def marked_async(*args: Any, **kwargs: Any) -> Any:
        with calls.timed():
            return calls.scored(await call(*args, **kwargs))

    return marked_async
