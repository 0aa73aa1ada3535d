"""Wrap the reward functions of a trainer, so that a call runs in a worker if required.

Called for each guarded `train()` call. A function is wrapped once and stays so, because the script may call
it between two `train()` calls. `--reward-workers` moves functions to workers, or one function moves after
it has failed twice at one step (`runtime/history/rewards.py`). A function in the rank is called through
`call_in_rank`, by which a stack shows which function hangs. Latencies go to the journal periodically.
Reward models are left alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.rewards import ALL, FailureKind, MovedReward, RewardCalls
from grpo_run.runtime.history.sample_masking import MaskingReason
from grpo_run.runtime.rank.rewards import host
from grpo_run.runtime.rank.rewards._failures import FailureLog, Sample
from grpo_run.runtime.rank.rewards._messages import Failure
from grpo_run.runtime.rank.rewards._packing import inner_function
from grpo_run.runtime.rank.rewards._pool import memory_limit_bytes
from grpo_run.runtime.rank.rewards._service import MovedFunction, RewardService
from grpo_run.runtime.rank.rollouts.reward_outputs import Failed, failed
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.headroom import least_headroom
from grpo_run.runtime.upstream.async_functions import finished_within, is_coroutine_function
from grpo_run.runtime.upstream.features import SAMPLE_MASKING, is_available
from grpo_run.watchdog.stalls.durations import Durations

WRITE_SECONDS = 60.0
"""Time between two events of one function."""


class LatencyLog:
    """Counts the calls of one function in this rank and attempt, and writes the totals so far.

    Args:
        name: of the function.
        write: writes an event, with this rank and its step.
        clock: returns monotonic seconds.
    """

    def __init__(self, name: str, write: Callable[..., None], clock: Callable[[], float]) -> None:
        self._name = name
        self._write = write
        self._clock = clock
        self._calls = self._written_calls = 0
        self._total_seconds = self._longest_seconds = 0.0
        self._write_at = clock()

    def add(self, seconds: float) -> None:
        """A call has returned, or was ended."""
        self._calls += 1
        self._total_seconds += seconds
        self._longest_seconds = max(self._longest_seconds, seconds)
        if self._clock() >= self._write_at:
            self.write()

    def write(self) -> None:
        """Write the totals, if there were calls since the last time."""
        self._write_at = self._clock() + WRITE_SECONDS
        if self._calls == self._written_calls:
            return
        self._written_calls = self._calls
        self._write(
            RewardCalls(
                function=self._name,
                calls=self._calls,
                total_seconds=round(self._total_seconds, 6),
                longest_seconds=round(self._longest_seconds, 6),
            )
        )


_SERVED = "_grpo_run_served"


_rewards: Rewards | None = None


def rewards_of(session: Session) -> Rewards:
    """Return the reward functions of the session's rank."""
    global _rewards
    if _rewards is None:
        _rewards = Rewards(session)
    return _rewards


def close_rewards() -> None:
    """End the workers of this rank, if it has any."""
    if _rewards is not None:
        _rewards.close()


class Rewards:
    """The reward functions of one rank. The session's bootstrap has forked the host of their workers, if any
    may be used.

    Args:
        session: of the rank.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._service: RewardService | None = None
        self._latencies: list[LatencyLog] = []
        self._masked = True
        self._log = FailureLog(self._write, self._warn)

    @contextmanager
    def served(self, trainer: Any) -> Iterator[None]:
        """Wrap the functions of a trainer; at the end of the block, write their latencies."""
        functions = getattr(trainer, "reward_funcs", None)
        self._masked = is_available(SAMPLE_MASKING, trainer)
        if isinstance(functions, list):
            self._wrap(functions, list(getattr(trainer, "reward_func_names", ())))
        try:
            yield
        finally:
            for latency in self._latencies:
                latency.write()

    def close(self) -> None:
        """End the workers."""
        if self._service is not None and self._session.is_rank:
            self._service.close()
            self._service = None

    def _wrap(self, functions: list[Any], names: list[str]) -> None:
        plain = [
            (index, names[index] if index < len(names) else _name(function))
            for index, function in enumerate(functions)
            if callable(function)
            and not isinstance(function, type)
            and not hasattr(function, "forward")
            and not getattr(function, _SERVED, False)
        ]
        moving = [(functions[index], name) for index, name in plain if self._is_moved(functions[index])]
        moved: list[MovedFunction] = []
        if moving:
            moved = self._open_service(len(moving)).add(moving)
        by_function = {id(one.function): one for one in moved}
        for index, name in plain:
            function = functions[index]
            functions[index] = self._wrapped(function, name, by_function.get(id(function)))

    def _is_moved(self, function: Any) -> bool:
        if host.started() is None:
            return False
        if self._session.config.reward_workers:
            return True
        moved = self._session.settings.moved_rewards
        return ALL in moved or _place(function) in moved

    def _open_service(self, functions: int) -> RewardService:
        if self._service is None:
            session, opened = self._session, host.started()
            assert opened is not None
            workers = session.config.reward_workers or functions
            available = least_headroom(Path("/dev/shm")).usable_bytes
            self._service = RewardService(
                opened,
                session.config,
                earlier=_durations(session.settings.reward_durations),
                workers=workers,
                memory_limit_bytes=memory_limit_bytes(available, workers * session.local_world_size),
                log=self._log,
                warn=self._warn,
                on_waiting=session.slot.record_work,
            )
        return self._service

    def _wrapped(self, function: Any, name: str, moved: MovedFunction | None) -> Any:
        latency = LatencyLog(name, self._write, time.monotonic)
        self._latencies.append(latency)

        def score(arguments: dict[str, Any]) -> list[Any] | None:
            """Return what a worker returns; None if the function is to be called in the rank."""
            if moved is None or moved.stays or self._service is None or not self._session.is_rank:
                return None
            return seen_by_trainer(self._service.score(moved, arguments), masked=self._masked)

        if is_coroutine_function(function):

            async def served_async(*args: Any, **kwargs: Any) -> Any:
                began = time.monotonic()
                try:
                    values = await _in_thread(lambda: score(kwargs)) if moved and not args else None
                    if values is not None:
                        return values
                    if moved is None:
                        return await function(*args, **kwargs)
                    with moved.tried() as excluded:
                        return await self._until_deadline(moved, function, args, kwargs)
                    return excluded
                finally:
                    latency.add(time.monotonic() - began)

            wrapper: Callable[..., Any] = served_async
        else:

            def served(*args: Any, **kwargs: Any) -> Any:
                began = time.monotonic()
                try:
                    values = score(kwargs) if not args else None
                    if values is not None:
                        return values
                    if moved is None:
                        return call_in_rank(function, args, kwargs)
                    with moved.tried() as excluded:
                        return call_in_rank(function, args, kwargs)
                    return excluded
                finally:
                    latency.add(time.monotonic() - began)

            wrapper = served
        functools.update_wrapper(wrapper, function)
        if not hasattr(function, "__name__"):
            wrapper.__name__ = _name(function)
        setattr(wrapper, _SERVED, True)
        return wrapper

    async def _until_deadline(
        self, moved: MovedFunction, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Await a function that cannot leave the rank; one that takes too long is cancelled."""
        seconds = moved.learned.longest_call_seconds()
        began = time.monotonic()
        task = await finished_within(function(*args, **kwargs), seconds)
        if task is not None:
            moved.learned.add(time.monotonic() - began)
            return task.result()
        prompts, completions = kwargs["prompts"], kwargs["completions"]
        failure = Failure(kind=FailureKind.timeout, message=f"did not return within {seconds:.3g} s")
        samples = [
            Sample(index=index, failure=failure, prompt=prompt, completion=completions[index])
            for index, prompt in enumerate(prompts)
        ]
        self._log.failed(moved.name, failure, samples, len(prompts))
        return seen_by_trainer([failed(MaskingReason.timeout)] * len(prompts), masked=self._masked)

    def _write(self, event: Event) -> None:
        session = self._session
        if session.is_rank:
            event = msgspec.structs.replace(event, rank=session.rank, step=session.slot.step + 1)
            session.journal.write(event)

    def _warn(self, text: str) -> None:
        session = self._session
        if session.is_main:
            session.warn(text)
        elif session.is_rank:
            session.warn_in_journal(text)


def seen_by_trainer(values: list[Any] | None, *, masked: bool) -> list[Any] | None:
    """Return the rewards that a trainer is given.

    Args:
        masked: samples of failures leave the loss. If not, failures are None, which TRL counts as 0; minus
            infinity would be the end of the loss.
    """
    if values is None or masked:
        return values
    return [None if isinstance(value, Failed) else value for value in values]


def call_in_rank(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a reward function here. `watchdog/diagnosis/_rewards.py` recognizes this frame."""
    return function(*args, **kwargs)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Run a call that blocks, without blocking the event loop. The thread ends with the call, which has a
    deadline.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # a cancelled caller cannot take it from the thread

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as raised:  # noqa: BLE001 - it is raised in the event loop
            future.set_exception(raised)

    threading.Thread(target=run, daemon=True, name="grpo-run-reward").start()
    return await asyncio.wrap_future(future)


def _durations(known: dict[str, Any] | None) -> Durations | None:
    """What earlier attempts have recorded; None if another version has written it."""
    try:
        return Durations.from_json(known) if known is not None else None
    except ValueError:
        return None


def _place(function: Any) -> MovedReward | None:
    """Where the code of a function is; None if it has no Python code."""
    code = getattr(inner_function(function), "__code__", None)
    return MovedReward(file=code.co_filename, function=code.co_name) if code is not None else None


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
