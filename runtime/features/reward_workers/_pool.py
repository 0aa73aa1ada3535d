"""The rank's workers: start them, give them calls, watch the calls, and end those that take too long.

One call runs in one worker; further calls at the same time wait for a free one. While a call runs, the rank
looks at its worker now and then, without a thread of its own. `WorkerHandle` is one worker and its keeper
seen from the rank: channels, resource usage, and its end. The rank kills the worker, and
the keeper all that it has started. `_service.py` decides what a failed call means.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from glob import glob

from grpo_run.runtime.features.reward_workers._deadlines import CallClock
from grpo_run.runtime.features.reward_workers._host import WorkerHost
from grpo_run.runtime.features.reward_workers._messages import (
    Failure,
    Reply,
    Task,
    open_channel,
    receive,
    send,
)
from grpo_run.runtime.features.reward_workers.events import FailureKind
from grpo_run.runtime.processes import usage
from grpo_run.watchdog.diagnosis.exits import signal_name
from grpo_run.watchdog.memory.host_reading import anonymous_bytes
from grpo_run.watchdog.processes import read_file, read_stat
from grpo_run.watchdog.run_processes.connections import read_connections
from grpo_run.watchdog.stalls.process_clocks import TreeReading

END_SECONDS = 15.0
"""How long a worker may take to end after it was killed; longer than its keeper waits."""
START_SECONDS = 60.0
MAX_LEFT_PROCESSES = 8
"""A worker that has left more processes than this is replaced, which ends them."""


class WorkerHandle:
    """One worker and its keeper, seen from the rank."""

    def __init__(self, host: WorkerHost) -> None:
        self._control, their_control = open_channel()
        self._tasks, their_tasks = open_channel()
        self._descriptor: int | None = None
        try:
            with their_control, their_tasks:
                host.start_worker(their_control, their_tasks)
            self.pid, (self._descriptor,) = self._read_report(START_SECONDS)
        except OSError:
            self.end()
            raise
        stat = read_stat(self.pid)
        self._keeper = stat.parent if stat is not None else 0
        self.functions: set[int] = set()
        self._poll = select.poll()
        self._poll.register(self._tasks, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        self._beat_at: float | None = None

    def send(self, content: bytes) -> None:
        """Send a task. Raises ConnectionError if the worker has ended, and OSError as `send` does."""
        self._beat_at = None
        send(self._tasks, content)

    def receive(self, seconds: float) -> bytes | None:
        """Return a reply that arrives within some time, or None. Returns earlier if there is a beat.

        Raises:
            ConnectionError: the worker has ended, or its reply is too large.
            OSError: no descriptor is left.
        """
        ready = {descriptor for descriptor, _ in self._poll.poll(seconds * 1000)}
        if self._tasks.fileno() in ready:
            message = receive(self._tasks)
            if message is None:
                raise ConnectionError("the worker has exited")
            self._beat_at = time.monotonic()
            return message.content or None
        if ready:
            raise ConnectionError("the worker has exited")
        return None

    def read_tree_usage(self) -> TreeReading | None:
        """Return what the worker's processes have used. It leads a session, as a rank does."""
        members = usage.find_process_trees([self.pid])[self.pid]
        used = usage.read_tree_usage(members)
        threads = usage.read_threads(members)
        if used is None or threads is None:
            return None
        # an event loop's own pair of sockets waits for nobody
        found = read_connections({0: members}, supervisor=[os.getpid()])[0]
        return replace(
            used,
            runnable=frozenset(number for number, thread in threads.items() if thread.state == "R"),
            connected=bool(found.outside) if found is not None else None,
        )

    def heartbeat_age(self, now: float) -> float:
        """Return for how long no thread of the worker's interpreter has run; 0 before it has begun."""
        return now - self._beat_at if self._beat_at is not None else 0.0

    def count_left_processes(self) -> int:
        """Return how many processes the worker has started that still exist, also as orphans or zombies."""
        keeper = self._keeper
        count = -1  # the keeper's children include the worker
        for path in (*glob(f"/proc/{self.pid}/task/*/children"), f"/proc/{keeper}/task/{keeper}/children"):
            count += len((read_file(path) or b"").split())
        return max(0, count)

    def how_it_ended(self) -> Failure:
        """Return how a worker ended by itself."""
        try:
            status, _ = self._read_report(END_SECONDS)
        except OSError:
            how = ""
        else:
            how = f" with exit code {os.WEXITSTATUS(status)}"
            if os.WIFSIGNALED(status):
                how = f" by {signal_name(os.WTERMSIG(status))}"
        return Failure(kind=FailureKind.died, message=f"ended its worker process{how}")

    def end(self) -> None:
        """End the worker and everything that it has started.

        One in uninterruptible sleep is left to its keeper after some seconds.
        """
        with contextlib.suppress(OSError):
            if self._descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
                os.close(self._descriptor)
            while True:  # until the keeper closes its end
                self._read_report(END_SECONDS)
        self._control.close()
        self._tasks.close()

    def _read_report(self, seconds: float) -> tuple[int, list[int]]:
        """Return the keeper's next number and descriptors.

        Raises:
            OSError: the keeper has ended, or has not reported in time.
        """
        self._control.settimeout(seconds)
        message = receive(self._control)
        if message is None:
            raise ConnectionError("the keeper of a reward worker has ended")
        return int(message.content), message.descriptors


LOOK_SECONDS = 0.25
"""Time between two looks at the memory of a worker that runs a call."""
PROGRESS_SECONDS = 1.0
GONE = (FailureKind.timeout, FailureKind.memory, FailureKind.died)
"""Failures after which a worker runs no further call."""
LEAST_LIMIT_BYTES = 2 * 1024**3
LIMIT_SHARE = 0.5
"""Share of the node's available memory that the workers of all its ranks may take together."""


class WorkerPool:
    """The workers of one rank.

    Args:
        host: forks them.
        size: how many calls may run at the same time.
        memory_limit_bytes: of one worker.
        on_waiting: is called about once per second while a call runs and is within its limits.
    """

    def __init__(
        self,
        host: WorkerHost,
        *,
        size: int,
        memory_limit_bytes: int,
        on_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._memory_limit_bytes = memory_limit_bytes
        self._on_waiting = on_waiting
        self._idle: queue.LifoQueue[WorkerHandle | None] = queue.LifoQueue()
        """Idle workers, and None for each that is not started yet."""
        for _ in range(size):
            self._idle.put(None)

    def prepare(self, modules: frozenset[str]) -> None:
        """Let the host import what a function needs, in the background.

        Raises:
            OSError: the host has ended.
        """
        self._host.prepare(modules)

    def call(self, task: Task, clock: CallClock) -> Reply:
        """Run one call in a worker; a reply with a failure if the worker had to be killed, or died.

        Args:
            task: with its function.
            clock: decides when it has taken too long.

        Raises:
            OSError: no worker can be started, or nothing can be sent: no descriptor is left.
        """
        worker, kept = self._idle.get(), None
        try:
            worker = worker or WorkerHandle(self._host)
            reply = self._run(worker, task, clock)
            gone = reply.failure is not None and reply.failure.kind in GONE
            if not gone and worker.count_left_processes() <= MAX_LEFT_PROCESSES:
                kept = worker
            return reply
        finally:
            if worker is not None and kept is None:
                worker.end()
            self._idle.put(kept)

    def refresh(self) -> None:
        """End the idle workers: the next calls run in fresh ones."""
        taken: list[WorkerHandle | None] = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._idle.get_nowait())
        for worker in taken:
            if worker is not None:
                worker.end()
            self._idle.put(None)

    def close(self) -> None:
        """End the workers and the host."""
        self.refresh()
        self._host.close()

    def _run(self, worker: WorkerHandle, task: Task, clock: CallClock) -> Reply:
        began = time.monotonic()
        if task.key in worker.functions:
            task = replace(task, function=None)
        try:
            worker.send(pickle.dumps(task))
            worker.functions.add(task.key)
            return self._await(worker, clock, began)
        except ConnectionError:
            return Reply(failure=worker.how_it_ended())

    def _await(self, worker: WorkerHandle, clock: CallClock, began: float) -> Reply:
        progress_at, look_at = began + PROGRESS_SECONDS, began + clock.look_seconds
        while True:
            content = worker.receive(min(LOOK_SECONDS, clock.look_seconds, clock.limit_seconds))
            if content is not None:
                reply: Reply = pickle.loads(content)
                return reply
            now = time.monotonic()
            reason = clock.overdue(now - began)
            if reason is None and now >= look_at:
                look_at = now + clock.look_seconds
                reason = clock.quiet(worker.read_tree_usage(), now) or clock.frozen(
                    usage.read_threads([worker.pid]), worker.heartbeat_age(now), now
                )
            if reason is not None:
                return _failed(FailureKind.timeout, reason)
            size = anonymous_bytes([worker.pid])
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
    return Reply(failure=Failure(kind=kind, message=message))


def memory_limit_bytes(available_bytes: int, workers: int) -> int:
    """Return the memory limit of one worker.

    Args:
        available_bytes: memory that the node can give to new work.
        workers: of all ranks of the node.
    """
    return max(LEAST_LIMIT_BYTES, int(LIMIT_SHARE * available_bytes / max(1, workers)))
