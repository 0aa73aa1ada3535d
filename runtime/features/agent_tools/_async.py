"""Tools and environments of AsyncGRPO, in the process that makes its rollouts.

TRL spawns that process from rank 0 and calls there what we send in the place of its class (`BoundedLoop`).
Blocking functions run in threads, as under TRL, and asynchronous ones in its event loop. A call that is late
is left behind, counted, made once more and told as in a rank (`_calls.py`); a thread that never ends stays
until its process does. An environment boots in the event loop, where a signal ends it.

A conversation that has to be left out gets no reward of any function, which TRL leaves out of baseline and
advantages of its group. It has a number here, in the place of a row: TRL resets an environment and begins a
conversation with it one after another.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_run.runtime.features.agent_tools._calls import AgentCalls
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.history.events import WarningGiven
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.rank.points import AgentCall
from grpo_run.runtime.upstream import async_grpo_names as names
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.runtime.upstream.patches import override_attributes
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.text import boot_name, reset_name, reward_name, tool_name

BEAT_SECONDS = 1.0
MOST_THREADS = 100_000
"""Threads are made when none is free, and one that is left behind is never free."""
_row: ContextVar[int | None] = ContextVar("grpo_run_conversation", default=None)


@dataclass(frozen=True, kw_only=True)
class BoundedLoop:
    """Makes TRL's loop in its process; sent there by pickle.

    Attributes:
        loop: TRL's class, or the script's.
    """

    loop: Any
    settings: ToolSettings
    deadlines: DeadlineSettings
    told: RankTools
    journal: Path
    run_id: str
    attempt: int

    def __call__(self, **kwargs: Any) -> Any:
        """Return the loop that TRL runs."""
        journal = Journal(self.journal, self.run_id)
        journal.attempt = self.attempt
        session: Any = SimpleNamespace(
            rank=0, is_rank=True, on_beat=[], journal=journal,
            slot=_Slot(kwargs[names.POLICY]),
            config=SimpleNamespace(of=lambda kind: self.settings, deadlines=self.deadlines),
            show_warning=lambda text: journal.write(WarningGiven(rank=0, text=text, shown=True)),
            warn_in_journal=lambda text: journal.write(WarningGiven(rank=0, text=text)),
        )  # fmt: skip
        calls = AgentCalls(None, session, self.told, masked=True, watched=False)
        ends = ExitStack()
        ends.enter_context(calls.armed())
        stopped = threading.Event()
        ends.callback(stopped.set)

        def beat() -> None:
            while not stopped.wait(BEAT_SECONDS):
                for one in session.on_beat:
                    one()

        threading.Thread(target=beat, name="grpo-run tools", daemon=True).start()
        return Conversations(calls, ends).bound(self.loop, kwargs)


class Conversations:
    """The conversations of one process."""

    def __init__(self, calls: AgentCalls, ends: ExitStack) -> None:
        self._calls, self._ends = calls, ends
        self._numbers = itertools.count()
        self._kinds: set[type] = set()
        self._begun: tuple[Any, int] | None = None
        """The environment that was reset last, and the number of its conversation."""
        self._number_of: dict[int, int] = {}
        """By the id of an environment: of its conversation."""
        self._scored_later: dict[int, int] = {}
        """By the id of a completion that is not scored yet: of its conversation."""

    def bound(self, kind: Any, kwargs: dict[str, Any]) -> Any:
        """Return TRL's loop with its calls bounded."""
        if (given := kwargs.get(names.ENVIRONMENT_FACTORY)) is not None:
            factories = given if isinstance(given, dict) else {None: given}
            booted = {name: self._boot(name, factory) for name, factory in factories.items()}
            kwargs[names.ENVIRONMENT_FACTORY] = booted if isinstance(given, dict) else booted[None]
        loop = kind(**kwargs)
        pools = getattr(loop, names.ENVIRONMENT_POOL, {})
        pools.update({name: _Sound(pool, self._calls.is_broken) for name, pool in pools.items()})
        threads = _Threads(MOST_THREADS, "grpo-tool")
        threads.bounded = lambda function: self._in_thread(function, threads, getattr(loop, names.EVENT_LOOP))
        for name, value in {
            names.TOOL_THREADS: threads,
            names.CONVERSE: functools.partial(self._converse, getattr(loop, names.CONVERSE)),
            names.SCORE: functools.partial(self._score, loop, getattr(loop, names.SCORE)),
            "run": functools.partial(self._run, loop.run),
        }.items():
            setattr(loop, name, value)
        return loop

    def _run(self, original: Callable[[], None]) -> None:
        with self._ends:
            original()

    def _boot(self, name: object, factory: Callable[[], Any]) -> Callable[[], Any]:
        shown = getattr(factory, "__qualname__", None) or name or type(factory).__name__
        call = AgentCall(name=boot_name(str(shown)), kind="boot", function=lambda: factory())
        booted = self._calls.replaced(call)

        def boot() -> Any:
            environment = booted()
            self._kinds.add(type(environment))
            return environment

        return boot

    def _call(self, function: Any, called: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in the place of a function of the script, which `called` calls."""
        name = getattr(function, "__name__", type(function).__name__)
        owner = getattr(function, "__self__", None)
        fields: dict[str, Any] = {"name": tool_name(name), "kind": "tool", "row": lambda given: _row.get()}
        if type(owner) in self._kinds:
            fields |= {"kind": "step", "environment": lambda given: owner}
            kind = type(owner).__qualname__
            if name == "reset":
                number = next(self._numbers)
                self._begun = owner, number
                self._calls.begin_row(number)
                fields |= {"kind": "reset", "name": reset_name(kind), "row": lambda given: number}
            elif name == "get_reward":
                number = self._number_of.get(id(owner), -1)
                fields |= {"kind": "reward", "name": reward_name(kind), "row": lambda given: number}
        return self._calls.replaced(AgentCall(function=called, **fields))

    def _in_thread(
        self, function: Callable[[], Any], threads: _Threads, loop: asyncio.AbstractEventLoop
    ) -> Future[Any]:
        """Call a function in a thread, bounded; return its future."""

        async def called() -> Any:
            return await asyncio.wrap_future(threads.begin(function))

        of_script = function.func if isinstance(function, functools.partial) else function
        return asyncio.run_coroutine_threadsafe(self._call(of_script, called)(), loop)

    def _converse(
        self, original: Callable[..., Any], prompt: Any, *args: Any, tool_dict: dict[str, Any], **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Begin a conversation, with the environment that was reset last."""
        (environment, number), self._begun = self._begun or (None, next(self._numbers)), None
        self._calls.begin_row(number)
        if environment is not None:
            self._number_of[id(environment)] = number
        tools = {
            name: self._call(tool, tool) if is_coroutine_function(tool) else tool
            for name, tool in tool_dict.items()
        }

        async def conversation() -> Any:
            _row.set(number)
            result = await original(prompt, *args, tool_dict=tools, **kwargs)
            self._scored_later[id(result[0])] = number
            return result

        return conversation()

    async def _score(self, loop: Any, original: Callable[..., Any], group: Any) -> Any:
        """Let TRL score a group, without the conversations that are left out."""
        numbers = [self._scored_later.pop(id(one), -1) for one in group.completions]
        left = {at for at, number in enumerate(numbers) if self._calls.end_row(number)}
        if not left:
            return await original(group)
        for name in names.GROUP_REWARDS:
            if values := getattr(group, name, None):
                values[:] = _without(left, values)
        functions = [_rewarding(function, left) for function in loop.reward_funcs]
        with override_attributes(loop, reward_funcs=functions):
            return await original(group)


def _without(left: set[int], values: Sequence[Any]) -> list[Any]:
    return [None if at in left else value for at, value in enumerate(values)]


def _rewarding(function: Callable[..., Any], left: set[int]) -> Callable[..., Any]:
    """Return a reward function that gives some completions none."""
    if is_coroutine_function(function):

        async def rewarded(**kwargs: Any) -> list[Any]:
            return _without(left, await function(**kwargs))

        return rewarded
    return lambda **kwargs: _without(left, function(**kwargs))


class _Sound(list[Any]):
    """A pool of environments, which takes back none in which a call was ended."""

    def __init__(self, pool: Iterable[Any], is_broken: Callable[[Any], bool]) -> None:
        super().__init__(pool)
        self._is_broken = is_broken

    def append(self, environment: Any) -> None:
        if not self._is_broken(environment):
            super().append(environment)


class _Threads(ThreadPoolExecutor):
    """The threads for blocking functions. What TRL submits is bounded."""

    bounded: Callable[[Callable[[], Any]], Future[Any]]
    begin = ThreadPoolExecutor.submit

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.bounded(functools.partial(function, *args, **kwargs) if args or kwargs else function)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)  # one of them may never end


class _Slot:
    """In the place of the board, which knows nothing of this process."""

    def __init__(self, version: Any) -> None:
        self._version = version

    @property
    def step(self) -> int:
        """Of the policy that generates."""
        return int(self._version.value)

    def record_work(self) -> None:
        """Do nothing: no hang detector looks at this process."""
