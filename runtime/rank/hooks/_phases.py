"""Marks on the board what a rank is doing, by wrapping methods and callbacks.

A wrapper opens a phase on the board, calls the original with its arguments unchanged, and closes the phase.
Called by `train_call.py` and `_rollout_hooks.py`. Does not change arguments or results. Reward functions have
wrappers of their own (`_reward_functions.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.step.step_vote import PhaseFingerprint
from grpo_run.runtime.upstream.patches import Handler, override_attributes
from grpo_run.watchdog.observation import Phase

UNMARKED_CALLBACKS = (
    *(f"transformers.trainer_callback.{name}Callback" for name in ("DefaultFlow", "Progress", "Printer")),
    "transformers.utils.notebook.",
    "grpo_run.",
)
"""How the full names of callbacks begin that return quickly and are not marked."""


def marked(phase: Phase, slot: SlotWriter, fingerprint: PhaseFingerprint) -> Handler:
    """Return a handler that marks a phase around a method of a trainer."""

    def mark(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Mark the phase on the board, and count it in what the ranks compare."""
        fingerprint.enter(phase)
        try:
            slot.enter(phase)
            return original(*args, **kwargs)
        finally:
            slot.leave(phase)

    return mark


@contextmanager
def mark_callbacks(
    handler: Any,
    base: type,
    slot: SlotWriter,
    note: Handler = lambda name, call, *args, **kwargs: call(*args, **kwargs),
) -> Iterator[None]:
    """Mark the user's own callbacks for the length of the block.

    A callback may upload or evaluate for a long time. That time must not count as the phase that calls it. It
    is measured by class and event.

    Args:
        handler: the trainer's `callback_handler`.
        base: transformers' `TrainerCallback`. Only methods that a callback overrides are wrapped.
        note: called with the name and the method, and then what the method takes; calls it.
    """
    events = [name for name in dir(base) if name.startswith("on_")]
    with ExitStack() as marks:
        for callback in handler.callbacks:
            if full_name(callback).startswith(UNMARKED_CALLBACKS):
                continue
            for name in events:
                method = getattr(type(callback), name, None)
                set_on_instance = name in getattr(callback, "__dict__", {})
                if method is not None and method is not getattr(base, name) and not set_on_instance:
                    method, shown = getattr(callback, name), callback_name(callback, name)
                    noted = functools.wraps(method)(functools.partial(note, shown, method))
                    wrapper = as_callback(noted, slot, shown)
                    # a frozen or slotted callback stays unmarked
                    with contextlib.suppress(AttributeError, TypeError):
                        marks.enter_context(override_attributes(callback, **{name: wrapper}))
        yield


def full_name(callback: object) -> str:
    """Return the module and the name of a callback's class."""
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def callback_name(callback: object, event: str) -> str:
    """Return the name that a callback's durations are kept by: `MyCallback.on_step_end`."""
    return f"{type(callback).__qualname__.rpartition('<locals>.')[2]}.{event}"


def as_callback(method: Callable[..., Any], slot: SlotWriter, name: str) -> Callable[..., Any]:
    """Return a function of the script that marks its calls under `name`."""

    @functools.wraps(method)
    def marked(*args: Any, **kwargs: Any) -> Any:
        try:
            slot.enter_callback(name)
            return method(*args, **kwargs)
        finally:
            slot.leave(Phase.callback)

    return marked
