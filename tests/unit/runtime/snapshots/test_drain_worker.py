"""The drain worker: replies, progress messages and exit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.snapshots import _drain_worker as drain_worker
from grpo_run.runtime.snapshots._drain_messages import (
    DrainFailed,
    DrainProgress,
    DrainPublished,
    DrainRequest,
)
from grpo_run.runtime.snapshots._drain_worker import DrainProcess, serve
from grpo_run.runtime.snapshots.area import StagingArea


@pytest.fixture
def connection(staging: StagingArea, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The supervisor's connection to a drain worker that runs in a thread of this process."""
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "nice", lambda more: more)
    monkeypatch.setattr(drain_worker, "die_with_parent", lambda parent: None)
    mine, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(str(staging.path), theirs, os.getpid()))
    thread.start()
    yield mine
    mine.close()
    thread.join(10.0)
    assert not thread.is_alive(), "the worker did not exit"


def test_requests_are_handled_in_order(
    staging: StagingArea, out: Path, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress messages first, then one reply each."""
    monkeypatch.setattr(drain_worker, "PROGRESS_SECONDS", 0.0)
    fill(staging.slots[0], snapshot(out, 5))
    connection.send(DrainRequest(slot=0))
    connection.send(DrainRequest(slot=1))
    replies: list[Any] = []
    while not replies or not isinstance(replies[-1], DrainFailed):
        assert connection.poll(10.0)
        replies.append(connection.recv())
    kinds = [type(entry) for entry in replies]
    assert kinds[-2:] == [DrainPublished, DrainFailed]
    assert set(kinds[:-2]) == {DrainProgress}


def test_the_worker_exits_when_the_connection_is_closed(
    staging: StagingArea, out: Path, connection: Any
) -> None:
    """During a request, without a traceback."""
    fill(staging.slots[0], snapshot(out, 5))
    connection.send(DrainRequest(slot=0))
    connection.close()


def test_what_was_taken_before_the_run_went_on_without_this_host_is_not_written(
    staging: StagingArea, out: Path, connection: Any
) -> None:
    """It counts as written: its steps were done again elsewhere, and ranks wait for its slot."""
    staged = snapshot(out, 5)
    fill(staging.slots[0], staged)
    fencing.record(staging.path, out, out / "fence", made=False, refused_before=staged.attempt + 1)
    connection.send(DrainRequest(slot=0))
    assert connection.poll(10.0)
    reply = connection.recv()
    assert isinstance(reply, DrainFailed)
    assert reply.superseded
    assert staging.slots[0].drained
    assert list(out.glob("checkpoint-*")) == []
    fencing.record(
        staging.path, out, fencing.prepare(out, staged.run_id), made=False, refused_before=staged.attempt
    )
    fill(staging.slots[0], staged)
    connection.send(DrainRequest(slot=0))
    assert connection.poll(10.0)
    assert isinstance(connection.recv(), DrainPublished | DrainProgress)


def test_the_worker_dies_with_the_forkserver_that_it_is_forked_from(
    staging: StagingArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another one than before: the last one was killed."""
    servers, context = [7], Context()
    names, module = drain_worker.process_names, drain_worker.multiprocessing
    monkeypatch.setattr(names, "forkserver_pid", lambda: servers[-1])
    monkeypatch.setattr(module.forkserver, "ensure_running", lambda: servers.append(9))
    monkeypatch.setattr(module, "get_context", lambda method: context)
    worker = DrainProcess(staging.path, preloaded=True)
    worker.send(DrainRequest(slot=0))
    assert (worker.pid, context.parent) == (8, 9)


class Context:
    """Multiprocessing, with a process that reads nothing."""

    def Pipe(self) -> Any:
        """A real pipe, of which the process keeps an end."""
        mine, theirs = Pipe()
        self.kept = Connection(os.dup(theirs.fileno()))
        return mine, theirs

    def Process(self, args: Any, **_: Any) -> Any:
        """A process that lives."""
        *_, self.parent = args
        return SimpleNamespace(pid=8, start=lambda: None, is_alive=lambda: True)
