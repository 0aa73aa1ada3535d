"""Tools in a rank: what is called in place of an agent's tools, and of what TRL calls of its environments.

A call that is ended, or that raises one of the exceptions by which its infrastructure fails (`_outages.py`),
is made once more: for a method of an environment, `reset` and the calls before it are repeated first, and
must answer as before; in a new environment if it was ended. If that fails too, TRL goes on as after any
exception of a tool, and the row leaves baseline and loss. An environment in which a call was ended is not
used again. Calls are counted by name for the journal.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_run.runtime.features.agent_tools._interruption import Interrupter
from grpo_run.runtime.features.agent_tools._limits import idle_seconds, limit_seconds
from grpo_run.runtime.features.agent_tools._outages import CallEndedError, OtherAnswerError, is_outage
from grpo_run.runtime.features.agent_tools.events import ToolCalls, ToolCancelled
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.rank.generators import GeneratorStates, read_generators, write_generators
from grpo_run.runtime.rank.points import AgentCall
from grpo_run.runtime.rank.rollouts.seeds import seed_of, takes_seed
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import finished_within, is_coroutine_function
from grpo_run.watchdog.stalls.durations import Durations

REASON = "tool"  # why the row of a call that has failed leaves, as a label of metrics
WRITE_SECONDS = 60.0  # between two events with the counts of one name
PAUSE_SECONDS = 1.0  # before a call is made once more: enough for a server that only drops connections


@dataclass
class _Known:
    """The calls of one name: how long they take, and what is not in the journal yet."""

    kind: str
    durations: Durations = field(default_factory=Durations)
    calls: int = 0
    failures: int = 0
    repeated: int = 0
    seconds: float = 0.0
    write_at: float = 0.0
    told: set[str] = field(default_factory=set)
    worker: Any = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class _Done:
    """A call of an environment that has returned, and the random generators before it if it has drawn."""

    made: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: GeneratorStates | None
    answer: Any


class AgentCalls:
    """Bounds the calls of one trainer's agents.

    Args:
        masked: rows can be left out of the trainer's loss.
        watched: the hang detector watches the process.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        told: RankTools,
        *,
        masked: bool,
        watched: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._told = told
        self._masked, self._watched = masked, watched
        self._clock = clock
        settings = session.config.of(ToolSettings)
        self._given, self._outages = settings.timeout_seconds, settings.infrastructure_errors
        self._interrupter = Interrupter(clock)
        self._known: dict[str, _Known] = {}
        self._reasons: dict[int, str] = {}
        self._broken: list[Any] = []  # kept for good: the end of one may take as long as its call
        # half of the least deadline, because displays count the time of a call from then on
        self._silent_seconds = session.config.deadlines.floor_seconds / 2
        # of each call that runs: when the hang detector is told next, and until when it is
        self._open: dict[object, list[float]] = {}
        # of each row with an environment that can be repeated: its calls since `reset`, and their answers
        self._done: dict[int | None, list[_Done]] = {}

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let calls be ended for the length of the block; then end the workers and write what was counted."""
        beats = self._session.on_beat
        with self._interrupter.armed():
            beats.append(self._beat)
            try:
                yield
            finally:
                beats.remove(self._beat)
                for name, known in self._known.items():
                    self._write(name, known)
                    if known.worker is not None:
                        known.worker.close()

    def _beat(self) -> None:
        """End what is overdue, and tell the hang detector of what is not: a call may wait for a lock, a file
        or a person, of which nothing is seen. Called by the heartbeat's thread.
        """
        self._interrupter.beat()
        now = self._clock()
        for times in list(self._open.values()):
            if times[0] <= now < times[1]:
                times[0] = now + self._silent_seconds
                self._session.slot.record_work()

    def begin_rollout(
        self, original: Callable[..., Any], rows: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Forget the rows of the rollout before, and the environments that it has left in a state that nobody
        knows: TRL makes others.
        """
        self._reasons = dict.fromkeys(range(len(rows)), "")
        self._done = {}
        for pool in getattr(self._trainer, trainer_names.ENVIRONMENTS, {}).values() if self._broken else ():
            pool[:] = [one for one in pool if not self.is_broken(one)]
        return original(rows, *args, **kwargs)

    def is_broken(self, environment: Any) -> bool:
        """Whether a call has left an environment in a state that nobody knows."""
        return any(environment is one for one in self._broken)

    def begin_row(self, row: int) -> None:
        """Begin a row that belongs to no rollout, or go on with it."""
        self._reasons.setdefault(row, "")

    def end_row(self, row: int) -> str:
        """Forget such a row; return why it leaves, or ""."""
        return self._reasons.pop(row, "")

    def row_reasons(self) -> Sequence[str] | None:
        """Return which rows of this rank's last rollout leave."""
        return list(self._reasons.values())

    def replaced(self, call: AgentCall) -> Callable[..., Any]:
        """Return what is called in place of a function."""
        if (known := self._known.get(call.name)) is None:
            told = self._told.durations.get(call.name)
            durations = Durations() if told is None else Durations.from_json(told)
            known = _Known(call.kind, durations, write_at=self._clock() + WRITE_SECONDS)
            self._known[call.name] = known
        if call.name in self._told.moved:
            self._move(call, known)
        if call.kind == "reset" and takes_seed(call.function):
            call = replace(call, function=self._seeded(call))
        if is_coroutine_function(call.function):
            return functools.partial(self._repeated_async, call, known)
        return functools.partial(self._booted if call.kind == "boot" else self._repeated, call, known)

    def _seeded(self, call: AgentCall) -> Callable[..., Any]:
        """Return a reset with a seed of its own in each rollout, the same in a step that is repeated."""

        def reset(*args: Any, **kwargs: Any) -> Any:
            if (row := call.row(args)) is not None:
                place = self._session.rank * len(self._reasons) + row
                kwargs.setdefault("seed", seed_of(self._trainer, place))
            return call.function(*args, **kwargs)

        return reset

    def _limit(self, known: _Known, *, asynchronous: bool = False) -> float:
        settings = self._session.config.deadlines
        shorter = asynchronous and self._watched
        limit = limit_seconds(self._given, known.durations, settings, asynchronous=shorter)
        return limit if known.worker is None else self._idle(known, limit)

    def _idle(self, known: _Known, limit: float) -> float:
        return idle_seconds(limit, self._given, known.durations, self._session.config.deadlines)

    @contextmanager
    def _counted(self, call: AgentCall, known: _Known, limit: float) -> Iterator[None]:
        began, returned, key = self._clock(), False, object()
        self._open[key] = [began + self._silent_seconds, began + self._idle(known, limit)]
        try:
            yield
            returned = True
        finally:
            del self._open[key]
            seconds = self._clock() - began
            known.calls += 1
            known.failures += not returned
            known.seconds += seconds
            if returned:
                known.durations = known.durations.then(Durations.of([0.0, seconds]))
            if self._clock() >= known.write_at:
                self._write(call.name, known)

    def _once(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        """Make a call, with its limit."""
        limit = self._limit(known)
        with self._counted(call, known, limit):
            if known.worker is not None:
                return known.worker.call(kwargs, limit)
            function: Any = call.function
            environment = call.environment(args)
            if call.kind == "step" and getattr(function, "__self__", None) is not environment is not None:
                function = functools.partial(function.__func__, environment)  # another one has its place
            return self._interrupter.run(limit, functools.partial(function, *args, **kwargs))

    async def _once_async(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        if known.worker is not None:
            async with known.turn:  # a worker runs one call at a time
                return await asyncio.to_thread(self._once, call, known, **kwargs)
        limit = self._limit(known, asynchronous=True)
        with self._counted(call, known, limit):
            if (task := await finished_within(call.function(*args, **kwargs), limit)) is None:
                raise CallEndedError(limit, "cancelled")
            return task.result()

    def _repeated(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        """Make a call, and make it once more if its infrastructure fails."""
        row, generators, failed = call.row(args), read_generators(), None
        made = functools.partial(self._once, call, known)
        while True:
            try:
                if failed is not None:
                    time.sleep(PAUSE_SECONDS)
                    args = self._prepared(call, row, args, failed)
                    write_generators(generators)
                result = made(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the script's own is raised again
                if failed is not None or not self._may_repeat(call, known, row, error):
                    return self._given_up(call, known, args, error)
                failed = error
            else:
                self._note(call, row, _Done(made, args, kwargs, generators, result))
                return result

    def _note(self, call: AgentCall, row: int | None, done: _Done) -> None:
        """Keep what was called of an environment, as long as its answers can be compared with later ones."""
        if call.kind == "reset" and row is not None:
            self._done[row] = []
        if call.kind in ("reset", "step") and row in self._done:
            if done.generators == read_generators():
                done.generators = None  # a state has 30 kB
            self._done[row].append(done)
            if not isinstance(done.answer, (str, int, float, type(None))):
                del self._done[row]

    async def _repeated_async(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        row, again = call.row(args), False
        if call.kind == "step":
            self._done.pop(row, None)  # those that run at the same time have no order
        while True:
            try:
                if again:
                    await asyncio.sleep(PAUSE_SECONDS)
                return await self._once_async(call, known, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the script's own is raised again
                if again or not self._may_repeat(call, known, row, error):
                    return self._given_up(call, known, args, error)
                again = True

    def _prepared(
        self, call: AgentCall, row: int | None, args: tuple[Any, ...], failed: Exception
    ) -> tuple[Any, ...]:
        """Bring a row's environment to where it was before a call that has failed, and return the arguments
        for another one. One in which a call was ended is replaced: nobody knows its state.

        Raises:
            OtherAnswerError: it does not boot, or does not answer as before.
        """
        ended, old = isinstance(failed, CallEndedError), call.environment(args)
        try:
            if ended and call.renew is not None:
                self._broken.append(old)
                args = call.renew(args)
                new = call.environment(args)
                for one in self._done.get(row, ()):
                    one.args = tuple(new if given is old else given for given in one.args)
            if call.kind == "step" or (ended and call.kind == "reward"):
                for one in self._done.get(row, ()):
                    if one.generators is not None:
                        write_generators(one.generators)
                    if one.made(*one.args, **one.kwargs) != one.answer:
                        raise OtherAnswerError("the calls before have other answers when they are repeated")
        except Exception as error:
            self._broken.append(call.environment(args))
            if isinstance(error, OtherAnswerError):
                raise
            raise OtherAnswerError(f"the calls before cannot be repeated: {_text(error)}") from error
        return args

    def _booted(self, call: AgentCall, known: _Known) -> Any:
        """Make an environment: once more after any failure, and for as long as a boot may take while its
        infrastructure fails.
        """
        until, again = self._clock() + self._idle(known, self._limit(known)), False
        while True:
            try:
                return self._once(call, known)
            except Exception as error:
                if again and (self._clock() >= until or not is_outage(error, self._outages)):
                    raise
                if not again:
                    self._session.show_warning(f"{call.name} failed ({_text(error)}): it is tried once more")
                again = True
            self._session.slot.record_work()
            time.sleep(PAUSE_SECONDS)

    def _move(self, call: AgentCall, known: _Known) -> None:
        """Let a worker run a tool, if it can be moved; say once if it cannot, or that it is."""
        if "moved" in known.told:
            return
        known.told.add("moved")
        from grpo_run.runtime.features.agent_tools._worker import ToolWorker

        text = (
            f"{call.name} runs in a worker process from here on, because attempts have ended in it: a call"
            " that takes too long is killed there"
        )
        cannot = f"{call.name} cannot be moved to a worker, though attempts have ended in it:"
        if call.kind != "tool":
            text = f"{cannot} an environment's state lies in the rank"
        else:
            try:
                known.worker = ToolWorker(call.function, self._session.slot.record_work)
            except Exception as error:  # noqa: BLE001 - pickling calls code of the script
                text = f"{cannot} it cannot be pickled: {_text(error)}"
        self._session.show_warning(text)

    def _may_repeat(self, call: AgentCall, known: _Known, row: int | None, error: Exception) -> bool:
        """Whether a call that has failed is made once more; if so, tell of it."""
        if self._left(row) or not is_outage(error, self._outages):
            return False
        ended = isinstance(error, CallEndedError) and call.kind != "tool"
        if ended and (row is None or call.renew is None or is_coroutine_function(call.function)):
            return False  # it has left the environment in a state that nobody knows
        if (call.kind == "step" or (ended and call.kind == "reward")) and row not in self._done:
            return False
        known.repeated += 1
        again = ", after those before it in its environment" if call.kind == "step" else ""
        self._tell(call, known, error, f"it is made once more{', in a new environment' if ended else again}")
        return True

    def _given_up(self, call: AgentCall, known: _Known, given: tuple[Any, ...], error: Exception) -> Any:
        """Take the row of a call out if its infrastructure has failed, and return or raise what TRL gets."""
        row, environment = call.row(given), call.environment(given)
        ended = isinstance(error, CallEndedError)
        if call.kind == "reward" and self._left(row):
            return 0.0  # it counts for nothing
        if call.kind == "step":
            self._done.pop(row, None)  # what it has changed is unknown
        if not is_outage(error, self._outages):
            raise error
        if environment is not None and (ended or call.kind == "reset"):
            self._broken.append(environment)
        masked = self._masked and row in self._reasons
        if row is not None and masked:
            self._reasons[row] = REASON
        lesson = "its sample is left out of the loss" if masked else "the model is shown the error"
        self._tell(call, known, error, lesson, masked=masked)
        if call.kind == "reset" and (masked or ended):
            return None  # no observation
        if call.kind == "reward" and masked:
            return 0.0
        raise error

    def _left(self, row: int | None) -> bool:
        return row is not None and bool(self._reasons.get(row))

    def _tell(
        self, call: AgentCall, known: _Known, error: Exception, lesson: str, *, masked: bool = False
    ) -> None:
        """Tell of a call that has failed: each thing that follows once of each name on the terminal."""
        session, text = self._session, f"failed ({_text(error)})"
        if isinstance(error, CallEndedError):
            usual = round(known.durations.median_seconds, 3) if known.durations.observed else None
            session.journal.write(ToolCancelled(
                rank=session.rank, tool=call.name, seconds=round(error.limit, 3), where=error.where,
                usual_seconds=usual, masked=masked,
            ))  # fmt: skip
            text = f"was {error.how} after {error.limit:.4g} s (--tool-timeout)"
            text += f" at {error.where}" if error.where else ""
            text += f", usually {usual:g} s" if usual is not None else ""
        if lesson in known.told:
            session.warn_in_journal(f"{call.name} {text}: {lesson}")
        else:
            known.told.add(lesson)
            session.show_warning(f"rank {session.rank}: {call.name} {text}: {lesson}")

    def _write(self, name: str, known: _Known) -> None:
        known.write_at = self._clock() + WRITE_SECONDS
        session = self._session
        if not known.calls or not session.is_rank:
            return
        session.journal.write(ToolCalls(
            rank=session.rank, step=session.slot.step + 1, tool=name, kind=known.kind, calls=known.calls,
            failures=known.failures, repeated=known.repeated, total_seconds=round(known.seconds, 6),
        ))  # fmt: skip
        known.calls = known.failures = known.repeated = 0
        known.seconds = 0.0


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]
