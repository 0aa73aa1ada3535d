"""What is called in place of a trainer's reward functions: a worker for those that may leave the rank.

`--reward-workers` moves all functions to workers, or one function moves after it has failed twice at one step
(`events.py`). A function is wrapped once and stays so, because the script may call it between two `train()`
calls. Failed calls go to the journal, and the first of each kind to the user.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.features.reward_workers._deadlines import Learned
from grpo_run.runtime.features.reward_workers._host import WorkerHost
from grpo_run.runtime.features.reward_workers._messages import Failure
from grpo_run.runtime.features.reward_workers._packing import inner_function
from grpo_run.runtime.features.reward_workers._pool import WorkerPool, memory_limit_bytes
from grpo_run.runtime.features.reward_workers._service import MovedFunction, RewardService, Sample
from grpo_run.runtime.features.reward_workers.events import ALL, MovedReward, RewardFailed
from grpo_run.runtime.features.reward_workers.settings import RankRewards, RewardWorkerSettings
from grpo_run.runtime.rank.points import Failed
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.headroom import least_headroom
from grpo_run.runtime.upstream.async_functions import is_coroutine_function
from grpo_run.watchdog.stalls.durations import Durations


class ServedRewards:
    """The reward functions of one rank.

    Args:
        session: of the rank.
        host: forks the workers.
        told: which functions run in workers, besides those that the configuration moves.
    """

    def __init__(self, session: Session, host: WorkerHost, told: RankRewards) -> None:
        self._session = session
        self._host = host
        self._told = told
        self._settings = session.config.of(RewardWorkerSettings)
        self._service: RewardService | None = None
        self._functions = 0
        self._masked = True
        self._warned: set[tuple[str, str]] = set()

    def begin_call(self, trainer: Any, *, masked: bool) -> None:
        """A trainer is about to train.

        Args:
            masked: samples can be left out of its loss.
        """
        self._masked = masked
        self._functions = len(getattr(trainer, "reward_funcs", ()))

    def close(self) -> None:
        """End the workers."""
        if self._service is not None and self._session.is_rank:
            self._service.close()
            self._service = None

    def wrap(self, function: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in place of a function.

        Args:
            name: of the function, as TRL logs it.
            call: runs the function in the rank.
        """
        if not self._is_moved(function):
            return call
        if self._service is None:
            self._service = self._open_service()
        moved = self._service.add(function, name)
        if is_coroutine_function(function):

            async def served_async(*args: Any, **kwargs: Any) -> Any:
                values = await asyncio.to_thread(self._score, moved, args, kwargs)
                if values is None:
                    with moved.tried() as values:
                        return await call(*args, **kwargs)
                return values

            return served_async

        def served(*args: Any, **kwargs: Any) -> Any:
            values = self._score(moved, args, kwargs)
            if values is None:
                with moved.tried() as values:
                    return call(*args, **kwargs)
            return values

        return served

    def _is_moved(self, function: Any) -> bool:
        moved = self._told.moved
        return bool(self._settings.workers) or ALL in moved or _place(function) in moved

    def _open_service(self) -> RewardService:
        session, told = self._session, self._told
        workers = self._settings.workers or max(1, self._functions)
        available = least_headroom(Path("/dev/shm")).usable_bytes
        earlier = _durations(told.durations)
        pool = WorkerPool(
            self._host,
            size=workers,
            memory_limit_bytes=memory_limit_bytes(available, workers * session.local_world_size),
            on_waiting=session.slot.record_work,
        )
        return RewardService(
            pool,
            lambda: Learned(session.config.deadlines, self._settings.timeout_seconds, earlier),
            log=self._failed,
            warn=self._warn,
        )

    def _score(self, moved: MovedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return what a worker returns; None if the function is to be called in the rank.

        Where samples of failures do not leave the loss, their rewards are None, which TRL counts as 0: minus
        infinity would be the end of the loss.
        """
        if args or self._service is None or not self._session.is_rank:
            return None
        values = self._service.score(moved, kwargs)
        if values is None or self._masked:
            return values
        return [None if isinstance(value, Failed) else value for value in values]

    def _failed(self, name: str, failure: Failure, samples: Sequence[Sample], batch: int) -> None:
        """Record a failed call: one journal event for each, and one warning per function and kind.

        Args:
            name: of the function.
            failure: of the whole batch.
            samples: those without a reward.
            batch: the number of samples of the batch.
        """
        session = self._session
        session.journal.write(
            RewardFailed(
                rank=session.rank,
                step=session.slot.step + 1,
                function=name,
                kind=str(failure.kind),
                message=failure.message[:MAX_TEXT_CHARACTERS],
                traceback=failure.traceback[-MAX_TRACEBACK_CHARACTERS:],
                masked=len(samples),
                batch=batch,
                samples=[_described(sample) for sample in samples[:MAX_SAMPLES]],
            )
        )
        if (name, failure.kind) in self._warned:
            return
        self._warned.add((name, failure.kind))
        said = f"raised {failure.message}" if failure.kind == "exception" else failure.message
        count = f"{len(samples)} of {batch} samples" if samples else "no sample"
        self._warn(f"reward function {name} {said}: {count} masked; further ones are counted and not shown")

    def _warn(self, text: str) -> None:
        session = self._session
        if session.is_main:
            session.warn(text)
        else:
            session.warn_in_journal(text)


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


MAX_SAMPLES = 8
"""Samples that one event describes; all of them are counted."""
MAX_TEXT_CHARACTERS = 300
MAX_TRACEBACK_CHARACTERS = 2000


def _described(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.index,
        "kind": str(sample.failure.kind),
        "message": sample.failure.message[:MAX_TEXT_CHARACTERS],
        "prompt": _text(sample.prompt),
        "completion": _text(sample.completion),
    }


def _text(value: Any) -> str:
    """The end of a prompt or a completion: conversations begin alike."""
    text = value if isinstance(value, str) else str(value[-1:] if isinstance(value, list) else value)
    return text[-MAX_TEXT_CHARACTERS:]
