"""A run whose snapshots are drained, without a worker process.

The worker is a fake that replies when it is polled, with the worker's own code unless a test replaces it. The
staging area and the disk are real; the tests advance the clock.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.checkpoints.search import snapshot_directories
from grpo_run.runtime.event import Event, as_record, event_name
from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.drain_scheduler import POLL_SECONDS, DrainScheduler
from grpo_run.runtime.snapshots.slot import StagedSnapshot
from grpo_run.watchdog.causes import Cause
from support.slots import fill, snapshot

Replies = Callable[[DrainRequest], list[Any]]
FULL = DrainFailed(slot=0, step=5, reason="No space left on device", full=True)
DIES = EOFError()
"""A reply that is the end of the connection."""
NO_PID = 1 << 30
"""Larger than any process id."""


class World:
    """A run with a staging area, a disk and a scheduler; records what the scheduler does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.out = folder / "out"
        self.staging = StagingArea(folder / "memory")
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.requests: list[DrainRequest] = []
        self.processes: list[SimpleNamespace] = []
        self.replies: Replies = self.drain
        self.refuses_to_start: OSError | None = None
        self._queue: list[Any] = []
        context = SimpleNamespace(Pipe=self._pipe, Process=self._process)
        monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
        self.scheduler = self.begin()

    def begin(self) -> DrainScheduler:
        """Create the scheduler of a new supervisor."""
        return DrainScheduler(
            self.staging,
            write=self.events.append,
            warn=self.warnings.append,
            preloaded=False,
            clock=lambda: self.now,
        )

    def drain(self, request: DrainRequest) -> list[Any]:
        """Reply as the drain worker does."""
        return [handle_request(self.staging, request, lambda written: None)]

    def full(self, request: DrainRequest) -> list[Any]:
        """Reply that the disk is full."""
        return [FULL]

    def hangs(self, request: DrainRequest) -> list[Any]:
        """Send no reply."""
        return []

    def poll(self, seconds: float = POLL_SECONDS, *, times: int = 1) -> None:
        """Advance the clock and poll the scheduler, at least once a second as the supervisor does."""
        for _ in range(times):
            end = self.now + seconds
            while self.now < end:
                self.now = min(end, self.now + 1.0)
                self.scheduler.poll()

    def suspend(self, seconds: float) -> None:
        """Advance the clock without a poll, as if all processes were stopped, and poll the scheduler."""
        self.now += seconds
        self.scheduler.poll()

    def take(self, index: int, step: int, **changes: Any) -> StagedSnapshot:
        """Write a snapshot as a rank does."""
        recorded = bool(changes.pop("recorded", True))
        return fill(self.staging.slots[index], snapshot(self.out, step, **changes), recorded=recorded)

    @property
    def slots(self) -> list[int]:
        """Slots of the requests, in order."""
        return [request.slot for request in self.requests]

    @property
    def durable(self) -> list[str]:
        """Names of the checkpoints and snapshots on disk."""
        snapshots = (name for place in snapshot_directories(self.out) for name in os.listdir(place))
        own = os.listdir(self.out) if self.out.exists() else []
        return sorted({*own, *snapshots} - {"_grpo_run"})

    @property
    def trouble(self) -> Cause | None:
        """What ranks see of a disk that is in trouble."""
        return StagingArea(self.staging.path).trouble

    def named(self, name: str) -> list[dict[str, Any]]:
        """Fields of the events with this name."""
        return [as_record(event) for event in self.events if event_name(event) == name]

    # the part of multiprocessing that the scheduler uses

    def _pipe(self) -> tuple[SimpleNamespace, nullcontext[None]]:
        self._queue = []
        mine = SimpleNamespace(send=self._send, poll=self._poll, recv=self._recv, close=lambda: None)
        return mine, nullcontext()

    def _process(self, *, target: Any, args: tuple[Any, ...], daemon: bool) -> SimpleNamespace:
        assert args[0] == str(self.staging.path)
        process = SimpleNamespace(pid=NO_PID, started=False, alive=True, killed=False, stubborn=False)

        def start() -> None:
            self._start()
            process.started = True

        process.start = start
        process.is_alive = lambda: process.alive

        def join(seconds: float) -> None:
            assert process.started, "can only join a started process"
            process.alive = process.alive and process.stubborn

        def kill() -> None:
            process.alive, process.killed = False, True

        process.join, process.kill = join, kill
        self.processes.append(process)
        return process

    def _start(self) -> None:
        if self.refuses_to_start is not None:
            raise self.refuses_to_start

    def _send(self, request: DrainRequest) -> None:
        self.requests.append(request)
        self._queue += self.replies(request)

    def _poll(self, seconds: float) -> bool:
        if not self._queue:
            self.now += seconds
        return bool(self._queue)

    def _recv(self) -> Any:
        entry = self._queue.pop(0)
        if isinstance(entry, BaseException):
            self.processes[-1].alive = False
            raise entry
        return entry

    def send_reply(self, entry: Any) -> None:
        """Queue a reply of the drain worker."""
        self._queue.append(entry)
