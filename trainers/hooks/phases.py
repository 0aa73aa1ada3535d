"""Marks what a rank is doing, by wrapping methods and reward functions without looking inside them.

A wrapper opens a phase on the board, calls through with whatever it was given, and closes the phase. It keeps
the name (TRL turns it into a metric's name) and whether the function is a coroutine. Called by `attach.py`.
Does not change arguments or results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.board.board import SlotWriter
from grpo_run.watchdog.observation import Phase


class Path:
    """The fingerprint of the phases a rank's main thread has entered since the last vote."""

    def __init__(self) -> None:
        self.value = 0

    def enter(self, phase: Phase) -> None:
        """Add one phase."""
        self.value = zlib.crc32(bytes((phase,)), self.value)

    def take(self) -> int:
        """The fingerprint, starting over."""
        value, self.value = self.value, 0
        return value


def wrap_method(owner: Any, name: str, phase: Phase, slot: SlotWriter, path: Path) -> None:
    """Replace a bound method by one that marks a phase; an instance without it is left alone."""
    method = getattr(owner, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        path.enter(phase)
        try:
            slot.enter(phase)
            return method(*args, **kwargs)
        finally:
            slot.leave(phase)

    setattr(owner, name, marked)


def wrap_reward(
    function: Callable[..., Any], slot: SlotWriter, *, counts_tokens: bool = False
) -> Callable[..., Any]:
    """A reward function that marks its phase and counts what it scored. Modules (reward models) stay themselves.

    Args:
        counts_tokens: count the completions' tokens too; of several functions over the same completions, one does.
    """
    if (
        isinstance(function, type)
        or hasattr(function, "forward")
        or getattr(function, "_grpo_run_marked", False)
    ):
        return function

    def count(result: Any, completion_ids: Any) -> Any:
        if hasattr(result, "__len__"):
            slot.rewards_scored += len(result)
        if counts_tokens and completion_ids is not None:
            slot.tokens_generated += sum(len(ids) for ids in completion_ids)
        slot.touch()
        return result

    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

        async def marked_async(*args: Any, **kwargs: Any) -> Any:
            return count(await function(*args, **kwargs), kwargs.get("completion_ids"))

        wrapper: Callable[..., Any] = marked_async
    else:

        def marked(*args: Any, **kwargs: Any) -> Any:
            try:
                slot.enter(Phase.reward)
                return count(function(*args, **kwargs), kwargs.get("completion_ids"))
            finally:
                slot.leave(Phase.reward)

        wrapper = marked
    functools.update_wrapper(wrapper, function)
    if not hasattr(function, "__name__"):
        wrapper.__name__ = type(function).__name__
    wrapper._grpo_run_marked = True  # type: ignore[attr-defined]
    return wrapper


def wrap_callbacks(handler: Any, base: type, slot: SlotWriter) -> Callable[[], None]:
    """Mark the user's own callbacks as the script's own time; returns what takes the marks off.

    What a callback does (an upload, an evaluation of its own) is no part of the phase it is called from, and may take
    a thousand times as long.

    Args:
        handler: the trainer's `callback_handler`.
        base: transformers' `TrainerCallback`; only what a callback overrides is wrapped.
    """
    wrapped: list[tuple[Any, str]] = []
    events = [name for name in dir(base) if name.startswith("on_")]
    for callback in handler.callbacks:
        if type(callback).__module__.startswith(OWN_CALLBACKS):
            continue
        for name in events:
            own = getattr(type(callback), name, None)
            mine = name in getattr(callback, "__dict__", {})
            if own is not None and own is not getattr(base, name) and not mine:
                with contextlib.suppress(AttributeError, TypeError):  # frozen or slotted: it goes unmarked
                    setattr(callback, name, _as_idle(getattr(callback, name), slot))
                    wrapped.append((callback, name))

    def undo() -> None:
        for callback, name in wrapped:
            callback.__dict__.pop(name, None)

    return undo


OWN_CALLBACKS = ("transformers.trainer_callback", "transformers.utils.notebook", "grpo_run.")
"""Modules whose callbacks are quick, and need no phase."""


def _as_idle(method: Callable[..., Any], slot: SlotWriter) -> Callable[..., Any]:
    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        try:
            slot.enter(Phase.idle)
            return method(*args, **kwargs)
        finally:
            slot.leave(Phase.idle)

    return marked
