"""Marks on the board which tool of an agent runs, and which environment boots, is reset or gives its reward.

TRL calls tools, and makes, resets and asks environments, inside a rollout. Each is measured by its name, like
a user's callback, so that one that hangs is named and has a deadline of its own. Called by
`_rollout_hooks.py`. Does not change arguments or results; a feature may call something in place of a function
(`RolloutPoints.agents`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, Literal

from grpo_run.runtime.rank.hooks._phases import as_callback
from grpo_run.runtime.rank.points import AgentCall, AgentWrapper
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import SHARDED, TrainerFacts
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.runtime.upstream.patches import Handler, override_attributes, wrapped_methods
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import boot_name, reset_name, reward_name, tool_name

_MARKED = "_grpo_run_tool"
_TOOLS = ((trainer_names.SYNC_TOOLS, False), (trainer_names.ASYNC_TOOLS, True))
"""Where TRL has the tools of each row, and whether they are asynchronous."""


@contextmanager
def mark_tools(
    trainer: Any, facts: TrainerFacts, session: Session, features: Sequence[AgentWrapper] = ()
) -> Iterator[None]:
    """Mark the tools and environments of a trainer for the length of the block; a trainer without them is
    left alone.

    Args:
        features: return what is called in place of a function; the last one counts.
    """
    if (text := uneven_turns(facts)) is not None:
        session.warn(text)
    agents = _Agents(trainer, session, features)
    with ExitStack() as marks:
        if facts.tools_available:
            mark = _marked_tools(trainer, agents)
            marks.enter_context(wrapped_methods(trainer, {trainer_names.TOOL_CALLS: [mark]}))
        if factories := getattr(trainer, trainer_names.FACTORIES, None):
            booted = {name: agents.boot(name, factory) for name, factory in factories.items()}
            marks.enter_context(override_attributes(trainer, **{trainer_names.FACTORIES: booted}))
        single = getattr(trainer, trainer_names.ENVIRONMENT_LIST, None) or ()
        pools = getattr(trainer, trainer_names.ENVIRONMENTS, {"": single})
        for kind in {type(environment) for pool in pools.values() for environment in pool}:
            marks.enter_context(override_attributes(kind, reset=agents.method(kind, "reset")))
            if callable(getattr(kind, "get_reward", None)):
                marks.enter_context(override_attributes(kind, get_reward=agents.method(kind, "reward")))
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


class _Agents:
    """Marks what TRL calls of one trainer's agents.

    Asynchronous tools run beside each other in TRL's event loop, in another thread, while the main thread
    waits for all of them: the phase lasts from the first one's start to the last one's end, and has the name
    of the first.
    """

    def __init__(self, trainer: Any, session: Session, features: Sequence[AgentWrapper]) -> None:
        self._trainer = trainer
        self._session = session
        self._features = features
        self._running = 0
        self._boots: dict[object, Callable[[], Any]] = {}

    def tool(self, function: Callable[..., Any], name: str, row: int, *, asynchronous: bool) -> Any:
        """Return a tool of one row, marked."""
        owner = getattr(function, "__self__", None)
        of_row = self._environments()[row] if row < len(self._environments()) else None
        is_step = owner is not None and owner is of_row

        def environment(given: tuple[Any, ...]) -> Any:
            return self._environments()[row] if is_step else None

        call = AgentCall(
            name=tool_name(name),
            kind="step" if is_step else "tool",
            function=function,
            row=lambda given: row,
            environment=environment,
            renew=self._renewing(environment) if is_step else None,
        )
        return self._async(call) if asynchronous else self._sync(call)

    def boot(self, name: object, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes an environment, marked."""
        shown = getattr(factory, "__qualname__", None) or name or type(factory).__name__

        def made() -> Any:  # a class is not wrapped: the wrapper would get its attributes
            return factory()

        call = AgentCall(name=boot_name(str(shown)), kind="boot", function=made)
        self._boots[name] = self._called(call)
        return self._sync(call)

    def method(self, kind: type, which: Literal["reset", "reward"]) -> Any:
        """Return `reset` or `get_reward` of an environment's class, marked: its instances may be pickled, or
        have no attributes of their own.
        """
        attribute, name = ("reset", reset_name) if which == "reset" else ("get_reward", reward_name)
        declared = inspect.getattr_static(kind, attribute)
        takes_instance = hasattr(type(declared), "__get__") and not isinstance(
            declared, (staticmethod, classmethod)
        )

        def environment(given: tuple[Any, ...]) -> Any:
            return given[0] if takes_instance and given else None

        call = AgentCall(
            name=name(kind.__qualname__),
            kind=which,
            function=getattr(kind, attribute),
            row=lambda given: self._row_of(environment(given)),
            environment=environment,
            renew=self._renewing(environment),
        )
        marked = self._async(call) if is_coroutine_function(call.function) else self._sync(call)
        return marked if takes_instance else staticmethod(marked)

    def _environments(self) -> Sequence[Any]:
        return getattr(self._trainer, trainer_names.ENVIRONMENT_LIST, None) or ()

    def _renewing(
        self, environment: Callable[[tuple[Any, ...]], Any]
    ) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
        """Return `AgentCall.renew` of a call that belongs to an environment."""
        pools = getattr(self._trainer, trainer_names.ENVIRONMENTS, {})

        def renew(given: tuple[Any, ...]) -> tuple[Any, ...]:
            old = environment(given)
            row = self._row_of(old)
            name, pool, at = next(
                (name, pool, at) for name, pool in pools.items() for at, one in enumerate(pool) if one is old
            )
            pool[at] = getattr(self._trainer, trainer_names.ENVIRONMENT_LIST)[row] = new = self._boots[name]()
            for attribute, _ in _TOOLS:  # those that were not called yet
                tools = getattr(self._trainer, attribute)[row]
                bound = [key for key, one in tools.items() if getattr(one, "__self__", None) is old]
                tools.update({key: MethodType(tools[key].__func__, new) for key in bound})
            return tuple(new if one is old else one for one in given)

        return renew if pools else None

    def _row_of(self, environment: Any) -> int | None:
        rows = (row for row, one in enumerate(self._environments()) if one is environment)
        return None if environment is None else next(rows, None)

    def _called(self, call: AgentCall) -> Callable[..., Any]:
        return self._features[-1](call) if self._features else call.function

    def _sync(self, call: AgentCall) -> Callable[..., Any]:
        marked = as_callback(self._called(call), self._session.slot, call.name)
        functools.update_wrapper(marked, call.function)
        setattr(marked, _MARKED, True)
        return marked

    def _async(self, call: AgentCall) -> Callable[..., Any]:
        slot, called = self._session.slot, self._called(call)

        @functools.wraps(call.function)
        async def marked(*args: Any, **kwargs: Any) -> Any:
            if not self._running:
                slot.enter_callback(call.name)
            self._running += 1
            try:
                return await called(*args, **kwargs)
            finally:
                self._running -= 1
                if not self._running:
                    slot.leave(Phase.callback)

        setattr(marked, _MARKED, True)
        return marked


def _marked_tools(trainer: Any, agents: _Agents) -> Handler:
    def mark_first(call_tools: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attribute, asynchronous in _TOOLS:
            for row, tools in enumerate(getattr(trainer, attribute, ())):
                for name, tool in tools.items():
                    if not hasattr(tool, _MARKED):
                        tools[name] = agents.tool(tool, name, row, asynchronous=asynchronous)
        return call_tools(*args, **kwargs)

    return mark_first
