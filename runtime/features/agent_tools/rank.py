"""Tools in a rank: what is called in place of an agent's tools, and of boot and reset of its environments.

A call that is ended raises `TimeoutError`, which TRL shows to the model as it shows any exception of a tool;
its row leaves baseline and loss. A reset that is ended returns nothing, and a boot is tried once more. An
environment in which a call was ended is not used again. Calls are counted by name for the journal.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.features.agent_tools._interruption import Interrupter, Overdue
from grpo_run.runtime.features.agent_tools._limits import ASYNCHRONOUS_SECONDS, limit_seconds
from grpo_run.runtime.features.agent_tools.events import ToolCalls, ToolCancelled
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.rank.points import AgentCall, RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.async_functions import finished_within, is_coroutine_function
from grpo_run.watchdog.stalls.durations import Durations

REASON = "tool"
"""Why the row of a call that was ended leaves, as a label of metrics."""
WRITE_SECONDS = 60.0
"""Time between two events with the counts of one name."""


@dataclass
class _Known:
    """The calls of one name: how long they take, and what is not in the journal yet."""

    kind: str
    durations: Durations = field(default_factory=Durations)
    calls: int = 0
    failures: int = 0
    seconds: float = 0.0
    write_at: float = 0.0
    told: bool = False
    worker: Any = None


class AgentCalls:
    """Bounds the calls of one trainer's agents.

    Args:
        masked: rows can be left out of the trainer's loss.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        told: RankTools,
        *,
        masked: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._told = told
        self._masked = masked
        self._clock = clock
        self._given = session.config.of(ToolSettings).timeout_seconds
        self._interrupter = Interrupter(clock)
        self._known: dict[str, _Known] = {}
        self._reasons: list[str] = []
        self._broken: list[Any] = []  # kept for good: the end of one may take as long as its call

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Let calls be ended for the length of the block; then end the workers and write what was counted."""
        beats = self._session.on_beat
        with self._interrupter.armed():
            beats.append(self._interrupter.beat)
            try:
                yield
            finally:
                beats.remove(self._interrupter.beat)
                for name, known in self._known.items():
                    self._write(name, known)
                    if known.worker is not None:
                        known.worker.close()

    def begin_rollout(
        self, original: Callable[..., Any], rows: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Forget the rows of the rollout before, and the environments that it has left in a state that nobody
        knows: TRL makes others.
        """
        self._reasons = [""] * len(rows)
        for pool in getattr(self._trainer, trainer_names.ENVIRONMENTS, {}).values() if self._broken else ():
            pool[:] = [one for one in pool if not any(one is broken for broken in self._broken)]
        return original(rows, *args, **kwargs)

    def row_reasons(self) -> Sequence[str] | None:
        """Return which rows of this rank's last rollout leave."""
        return self._reasons

    def replaced(self, call: AgentCall) -> Callable[..., Any]:
        """Return what is called in place of a function."""
        if (known := self._known.get(call.name)) is None:
            known = self._known[call.name] = self._learned(call)
        if call.name in self._told.moved:
            self._move(call, known)
        if known.worker is not None and is_coroutine_function(call.function):
            return self._served_async(call, known)
        if known.worker is not None:
            return functools.partial(self._served, call, known)
        if is_coroutine_function(call.function):
            return self._cancelled_async(call, known)
        return functools.partial(self._booted if call.kind == "boot" else self._interrupted, call, known)

    def _learned(self, call: AgentCall) -> _Known:
        known = self._told.durations.get(call.name)
        durations = Durations() if known is None else Durations.from_json(known)
        return _Known(call.kind, durations, write_at=self._clock() + WRITE_SECONDS)

    def _limit(self, known: _Known, *, asynchronous: bool = False) -> float:
        settings = self._session.config.deadlines
        return limit_seconds(self._given, known.durations, settings, asynchronous=asynchronous)

    @contextmanager
    def _counted(self, call: AgentCall, known: _Known) -> Iterator[None]:
        began, returned = self._clock(), False
        try:
            yield
            returned = True
        finally:
            seconds = self._clock() - began
            known.calls += 1
            known.failures += not returned
            known.seconds += seconds
            if returned:
                known.durations = known.durations.then(Durations.of([0.0, seconds]))
            if self._clock() >= known.write_at:
                self._write(call.name, known)

    def _interrupted(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        limit = self._limit(known)
        try:
            with self._counted(call, known):
                result = self._interrupter.run(limit, functools.partial(call.function, *args, **kwargs))
                if isinstance(result, Overdue):
                    raise self._ended(call, known, limit, args, "interrupted", where=result.where)
                return result
        except _CallEndedError:
            if call.kind == "reset":
                return None  # no observation
            raise

    def _booted(self, call: AgentCall, known: _Known, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._interrupted(call, known, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the script's own; raised if it comes again
            self._session.show_warning(f"{call.name} failed ({_text(error)}): it is tried once more")
            return self._interrupted(call, known, *args, **kwargs)

    def _cancelled_async(self, call: AgentCall, known: _Known) -> Callable[..., Any]:
        async def limited(*args: Any, **kwargs: Any) -> Any:
            limit = self._limit(known, asynchronous=True)
            with self._counted(call, known):
                task = await finished_within(call.function(*args, **kwargs), limit)
                if task is None:
                    raise self._ended(call, known, limit, args, "cancelled")
                return task.result()

        return limited

    def _served(self, call: AgentCall, known: _Known, **kwargs: Any) -> Any:
        from grpo_run.runtime.features.agent_tools._worker import WorkerEndedError

        limit = self._limit(known)
        if not known.durations.observed and self._given is None:
            limit = min(limit, ASYNCHRONOUS_SECONDS)
        with self._counted(call, known):
            try:
                return known.worker.call(kwargs, limit)
            except WorkerEndedError as error:
                raise self._ended(call, known, limit, (), f"killed ({error})") from error

    def _served_async(self, call: AgentCall, known: _Known) -> Callable[..., Any]:
        turn = asyncio.Lock()

        async def served(**kwargs: Any) -> Any:
            async with turn:  # a worker runs one call at a time
                return await asyncio.to_thread(self._served, call, known, **kwargs)

        return served

    def _move(self, call: AgentCall, known: _Known) -> None:
        """Let a worker run a tool, if it can be moved; say once if it cannot, or that it is."""
        if known.told:
            return
        known.told = True
        from grpo_run.runtime.features.agent_tools._worker import ToolWorker

        why = "" if call.kind == "tool" else "an environment's state lies in the rank"
        if not why:
            try:
                known.worker = ToolWorker(call.function, self._session.slot.record_work)
            except Exception as error:  # noqa: BLE001 - pickling calls code of the script
                why = f"it cannot be pickled: {_text(error)}"
        if why:
            text = f"{call.name} cannot be moved to a worker, though attempts have ended in it: {why}"
        else:
            text = (
                f"{call.name} runs in a worker process from here on, because attempts have ended in it: a"
                " call that takes too long is killed there"
            )
        self._session.show_warning(text)

    def _ended(
        self,
        call: AgentCall,
        known: _Known,
        limit: float,
        given: tuple[Any, ...],
        what: str,
        *,
        where: str = "",
    ) -> _CallEndedError:
        """Tell of a call that was ended, take its row out, and return what it raises."""
        row, environment = call.row(given), call.environment(given)
        if environment is not None:
            self._broken.append(environment)
        masked = self._masked and row is not None and row < len(self._reasons)
        if row is not None and masked:
            self._reasons[row] = REASON
        usual = round(known.durations.median_seconds, 3) if known.durations.observed else None
        session = self._session
        session.journal.write(
            ToolCancelled(
                rank=session.rank,
                tool=call.name,
                seconds=round(limit, 3),
                where=where,
                usual_seconds=usual,
                masked=masked,
            )
        )
        lesson = "its sample is left out of the loss" if masked else "the model is shown the error"
        text = (
            f"{call.name} was {what} after {limit:.4g} s (--tool-timeout)"
            + (f" at {where}" if where else "")
            + (f", usually {usual:g} s" if usual is not None else "")
            + f": {lesson}"
        )
        if known.told:
            session.warn_in_journal(text)
        else:
            known.told = True
            session.show_warning(f"rank {session.rank}: {text}")
        return _CallEndedError(f"no answer within {limit:g} s")

    def _write(self, name: str, known: _Known) -> None:
        known.write_at = self._clock() + WRITE_SECONDS
        session = self._session
        if not known.calls or not session.is_rank:
            return
        session.journal.write(
            ToolCalls(
                rank=session.rank,
                step=session.slot.step + 1,
                tool=name,
                kind=known.kind,
                calls=known.calls,
                failures=known.failures,
                total_seconds=round(known.seconds, 6),
            )
        )
        known.calls = known.failures = 0
        known.seconds = 0.0


class _CallEndedError(TimeoutError):
    """A call was ended by us."""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


class ToolsPart(RankFeature):
    """Tools at the points of a rank."""

    name = ToolSettings.NAME

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Bound the calls of a trainer's agents; a trainer without them is left alone."""
        environments = getattr(trainer, trainer_names.FACTORIES, None)
        if not (points.facts.has_tools or environments):
            return
        told = RankTools.model_validate(session.settings.features.get(self.name) or {})
        calls = AgentCalls(trainer, session, told, masked=points.facts.rows_can_leave)
        points.agents.append(calls.replaced)
        points.inputs.append(calls.begin_rollout)
        if session.config.of(ToolSettings).timeout_seconds != 0:
            points.leaving.append(calls.row_reasons)
        points.hooks.enter_context(calls.armed())


PART = ToolsPart()
