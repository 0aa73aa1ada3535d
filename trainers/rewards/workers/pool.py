"""The rank's workers: starting them, giving them calls, watching calls, and ending workers that take too long.

One call runs in one worker; further calls at the same time wait for a free one. While a call runs, the rank looks at its
worker now and then, without a thread of its own. `service.py` decides what a failed call means.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from grpo_run.runtime.continuity.rewards import FailureKind
from grpo_run.trainers.rewards.deadlines import CallClock
from grpo_run.trainers.rewards.workers.host import Host
from grpo_run.trainers.rewards.workers.messages import (
    Failure,
    Reply,
    Task,
)
from grpo_run.trainers.rewards.workers.worker_handle import WorkerHandle

LOOK_SECONDS = 0.25
"""Time between two looks at the memory of a worker that runs a call."""
PROGRESS_SECONDS = 1.0
LEAST_LIMIT_BYTES = 2 * 1024**3
LIMIT_SHARE = 0.5
"""Share of the node's available memory that the workers of all its ranks may take together."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call for the pool: `function` is pickled, `clock` decides when it has taken too long."""

    key: int
    function: bytes
    task: Task
    clock: CallClock


class WorkerPool:
    """The workers of one rank.

    Args:
        host: forks them.
        size: how many calls may run at the same time.
        memory_limit_bytes: of one worker.
        on_replaced: is told why a worker was replaced between two calls.
        on_waiting: is called about once per second while a call runs and is within its limits.
    """

    def __init__(
        self,
        host: Host,
        *,
        size: int,
        memory_limit_bytes: int,
        on_replaced: Callable[[str], None] = lambda reason: None,
        on_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._memory_limit_bytes = memory_limit_bytes
        self._on_replaced = on_replaced
        self._on_waiting = on_waiting
        self._free = threading.Semaphore(size)
        self._lock = threading.Lock()
        self._idle: list[WorkerHandle] = []
        self._numbers = itertools.count()

    def call(self, call: Call) -> Reply:
        """Run one call in a worker; a reply with a failure if the worker had to be killed, or died.

        Raises:
            OSError: no worker can be started.
        """
        with self._free:
            worker = self._take()
            reply = self._run(worker, call)
            if reply.failure is not None and reply.failure.kind in (
                FailureKind.timeout,
                FailureKind.memory,
                FailureKind.died,
            ):
                worker.end()
                return reply
            reason = worker.why_replace(reply)
            if reason is not None:
                self._on_replaced(reason)
                worker.end()
            else:
                with self._lock:
                    self._idle.append(worker)
            return reply

    def refresh(self) -> None:
        """End the idle workers: the next calls run in fresh ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def close(self) -> None:
        """End the workers and the host."""
        self.refresh()
        self._host.close()

    def _take(self) -> WorkerHandle:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            return WorkerHandle(self._host)

    def _run(self, worker: WorkerHandle, call: Call) -> Reply:
        began = time.monotonic()
        known = call.key in worker.functions
        task = call.task if known else replace(call.task, function=call.function)
        try:
            worker.send(pickle.dumps(task), began + call.clock.limit_seconds)
            worker.functions.add(call.key)
            return self._await(worker, call.clock, began)
        except TimeoutError:
            return _failed(FailureKind.timeout, call.clock.overdue(call.clock.limit_seconds) or "")
        except OSError:
            return Reply(failure=worker.how_it_ended(), records=[])

    def _await(self, worker: WorkerHandle, clock: CallClock, began: float) -> Reply:
        progress_at, look_at = began + PROGRESS_SECONDS, began + clock.look_seconds
        while True:
            frame = worker.receive(min(LOOK_SECONDS, clock.look_seconds, clock.limit_seconds))
            if frame is not None:
                reply: Reply = pickle.loads(frame)
                return reply
            now = time.monotonic()
            reason = clock.overdue(now - began)
            if reason is None and now >= look_at:
                look_at = now + clock.look_seconds
                reason = clock.quiet(worker.read_family(), now) or clock.frozen(
                    worker.read_threads(), worker.heartbeat_age(now), now
                )
            if reason is not None:
                return _failed(FailureKind.timeout, reason)
            size = worker.memory_bytes()
            if size > self._memory_limit_bytes:
                limit = f"{self._memory_limit_bytes / 2**30:.1f} GiB"
                return _failed(
                    FailureKind.memory,
                    f"used {size / 2**30:.1f} GiB of memory, more than the limit of {limit}",
                )
            if now >= progress_at:
                progress_at = now + PROGRESS_SECONDS
                self._on_waiting()


def _failed(kind: FailureKind, message: str) -> Reply:
    return Reply(failure=Failure(kind=kind, message=message), records=[])


def memory_limit_bytes(available_bytes: int, workers: int) -> int:
    """Return the memory limit of one worker.

    Args:
        available_bytes: memory that the node can give to new work.
        workers: of all ranks of the node.
    """
    return max(LEAST_LIMIT_BYTES, int(LIMIT_SHARE * available_bytes / max(1, workers)))
