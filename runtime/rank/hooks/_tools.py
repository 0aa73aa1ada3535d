"""Marks on the board which tool of an agent runs, and cancels an asynchronous tool that is late.

TRL calls tools and `reset` of environments inside a rollout. Each is measured by its name, like a user's
callback, so that a tool that hangs is named and has a deadline of its own. Called by `_rollout_hooks.py`.
Does not change arguments or results, and does not end a synchronous tool: nothing in the process can, and the
hang detector does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.rank.hooks._phases import as_callback
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import SHARDED, TrainerFacts
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import finished_within
from grpo_run.runtime.upstream.patches import Handler, override_attributes, wrapped_methods
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import reset_name, tool_name

_MARKED = "_grpo_run_tool"


@contextmanager
def mark_tools(trainer: Any, facts: TrainerFacts, session: Session) -> Iterator[None]:
    """Mark the tools and environments of a trainer for the length of the block; a trainer without them is
    left alone.
    """
    if (text := uneven_turns(facts)) is not None:
        session.warn(text)
    with ExitStack() as marks:
        if facts.tools_available:
            mark = _marked_tools(trainer, session)
            marks.enter_context(wrapped_methods(trainer, {trainer_names.TOOL_CALLS: [mark]}))
        single = getattr(trainer, trainer_names.ENVIRONMENT_LIST, None) or ()
        pools = getattr(trainer, trainer_names.ENVIRONMENTS, {"": single})
        for kind in {type(environment) for pool in pools.values() for environment in pool}:
            marks.enter_context(override_attributes(kind, reset=_marked_reset(kind, session)))
        yield


def uneven_turns(facts: TrainerFacts) -> str | None:
    """Return a warning if the ranks of an agent may call the model unequally often where that is a deadlock;
    else None.

    TRL's loop over tool calls ends on each rank by itself.
    """
    sharded = SHARDED.get(facts.layout)
    if facts.world_size == 1 or sharded is None or not facts.has_tools:
        return None
    if facts.uses_vllm:
        return None  # the model itself is not called
    return (
        f"with {sharded} all ranks must generate equally often, and TRL ends the calls of tools on each rank"
        " by itself: if the completions of one rank call tools in more turns than those of another, the"
        " ranks deadlock, which is proved and reported; use ZeRO-2, DDP or vLLM for agents"
    )


class ToolCancelled(Event, kw_only=True):
    """A call of a tool was cancelled after so many seconds, and the model is shown the error."""

    tool: str
    seconds: float


class _AsyncTools:
    """Marks and limits the asynchronous tools of one trainer.

    They run beside each other in TRL's event loop, in another thread, while the main thread waits for all of
    them: the phase lasts from the first one's start to the last one's end, and has the name of the first.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._running = 0

    def mark(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Limit each call. TRL shows the error to the model as the tool's result, as for any exception of a
        tool.
        """
        slot = self._session.slot

        @functools.wraps(function)
        async def limited(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                slot.enter_callback(name)
            self._running += 1
            try:
                return await self._limited(function(*args, **kwargs), name)
            finally:
                self._running -= 1
                if not self._running:
                    slot.leave(Phase.callback)

        setattr(limited, _MARKED, True)
        return limited

    async def _limited(self, call: Awaitable[Any], name: str) -> Any:
        limit_seconds = self._session.config.timeouts.tool_seconds
        task = await finished_within(call, limit_seconds)
        if task is not None:
            return task.result()
        session = self._session
        session.journal.write(ToolCancelled(rank=session.rank, tool=name, seconds=limit_seconds))
        text = (
            f"{name} was cancelled after {limit_seconds:g} s (--tool-timeout): the model is shown the error"
        )
        session.notify(text)
        session.warn_in_journal(text)
        raise TimeoutError(f"no answer within {limit_seconds:g} s")


def _marked_tools(trainer: Any, session: Session) -> Handler:
    kinds = (
        (trainer_names.SYNC_TOOLS, functools.partial(_sync, session)),
        (trainer_names.ASYNC_TOOLS, _AsyncTools(session).mark),
    )

    def mark_first(call_tools: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attribute, mark in kinds:
            for tools in getattr(trainer, attribute, ()):
                for name, tool in tools.items():
                    if not hasattr(tool, _MARKED):
                        tools[name] = mark(tool, tool_name(name))
        return call_tools(*args, **kwargs)

    return mark_first


def _sync(session: Session, function: Callable[..., Any], name: str) -> Callable[..., Any]:
    marked = as_callback(function, session.slot, name)
    setattr(marked, _MARKED, True)
    return marked


def _marked_reset(environment: type, session: Session) -> Any:
    """Return `reset` of an environment's class, marked: its instances may be pickled, or have no attributes
    of their own.
    """
    marked = _sync(session, environment.reset, reset_name(environment.__qualname__))  # type: ignore[attr-defined]
    declared = inspect.getattr_static(environment, "reset")
    takes_instance = hasattr(type(declared), "__get__") and not isinstance(
        declared, (staticmethod, classmethod)
    )
    return marked if takes_instance else staticmethod(marked)
