"""An entry says whether its collective is waited for, and for how long."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.builders.trainers.recorded_collectives import Handle, entries

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.collective_recorder import MAX_TRACKED, OwnLog, Recorder
from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress


class Waited:
    """A handle. Each wait notes what readers see meanwhile, and raises the next of `errors`, if any."""

    def __init__(self, board: Board, recorder: Recorder, *errors: Exception | None) -> None:
        self.board, self.recorder, self.errors = board, recorder, list(errors)
        self.seen: list[Collective] = []
        self.blocked: list[set[int]] = []
        self.given: list[Any] = []

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Read the board."""
        self.seen.append(entries(self.board)[-1])
        self.blocked.append(set(self.recorder.waiting))
        self.given.append((args, kwargs))
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return True

    @property
    def progress(self) -> list[CollectiveProgress]:
        """What each wait has seen."""
        return [entry.progress for entry in self.seen]


@pytest.fixture
def issue(recorder: Recorder, board: Board, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Waited]:
    """Log a collective, and return its handle, whose waits raise the given errors."""
    monkeypatch.setattr(Waited, "wait", Waited.wait)
    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Waited))

    def run(*errors: Exception | None, on_host: bool = True, limited: bool = False) -> Waited:
        work = Waited(board, recorder, *errors)
        number = OwnLog(recorder, "grpo_run/vote", world_size=2).issued(1, "allreduce", torch.ones(8), work)
        recorder.track(work, number, on_host, limited)
        return work

    return run


def test_a_collective_is_complete_after_its_wait(installed: Recorder, board: Board) -> None:
    """A synchronous collective at once; an asynchronous one when its handle has been waited for."""
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.completed


@pytest.mark.parametrize(
    ("error", "on_host", "limited", "after"),
    [
        (None, True, False, CollectiveProgress.completed),
        (RuntimeError("Connection closed by peer"), True, False, CollectiveProgress.enqueued),
        (None, False, False, CollectiveProgress.enqueued),
        (None, True, True, CollectiveProgress.completed),
    ],
    ids=["returns", "peer is gone", "on a device", "time limit"],
)
def test_an_entry_is_waiting_while_a_thread_waits(
    issue: Callable[..., Waited],
    recorder: Recorder,
    board: Board,
    error: Exception | None,
    on_host: bool,
    limited: bool,
    after: CollectiveProgress,
) -> None:
    """With the thread's id. On a device the wait only orders streams, and the Flight Recorder knows when the
    work is done. A thread that waits with a time limit is not blocked.
    """
    work, thread = issue(error, on_host=on_host, limited=limited), threading.get_ident()
    with pytest.raises(RuntimeError, match="closed by peer") if error else nullcontext():
        assert work.wait()
    assert [(entry.progress, entry.thread) for entry in work.seen] == [
        (CollectiveProgress.waiting, str(thread))
    ]
    assert work.blocked == [set() if limited else {thread}]
    assert recorder.waiting == set()
    assert entries(board)[-1].progress is after


def test_only_waits_up_to_the_first_that_returns_are_marked(
    issue: Callable[..., Waited], recorder: Recorder, board: Board
) -> None:
    """The first one may have been interrupted; one after it returns at once. A handle that is not tracked is
    passed through.
    """
    work = issue(RuntimeError("interrupted"))
    with pytest.raises(RuntimeError, match="interrupted"):
        work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    assert work.wait()
    assert recorder._tracked == {}
    assert work.wait()
    assert Waited(board, recorder).wait()
    waiting, completed = CollectiveProgress.waiting, CollectiveProgress.completed
    assert work.progress == [waiting, waiting, completed]
    assert [entry.progress for entry in entries(board)] == [completed]


def test_the_oldest_tracked_handles_are_dropped(recorder: Recorder) -> None:
    """A script may never wait for some."""
    works = [Handle() for _ in range(MAX_TRACKED + 10)]
    for number, work in enumerate(works, 1):
        recorder.track(work, number, True)
    assert len(recorder._tracked) == MAX_TRACKED
    assert id(works[0]) not in recorder._tracked
    number, on_host, limited, tracked = recorder._tracked[id(works[-1])]
    assert (number, on_host, limited, tracked()) == (len(works), True, False, works[-1])


def test_a_new_handle_at_the_address_of_a_freed_one_is_not_tracked(
    issue: Callable[..., Waited], recorder: Recorder, board: Board
) -> None:
    """Its wait must not mark the entry of the freed handle."""
    send = Waited(board, recorder)
    recorder._tracked[id(send)] = recorder._tracked.pop(id(issue()))
    gc.collect()
    assert send.wait()
    assert send.progress == [CollectiveProgress.enqueued]
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_tracking_keeps_no_tensor_alive(installed: Recorder) -> None:
    """A handle refers to its tensors, which occupy device memory."""
    tensor = torch.ones(1)
    before = sys.getrefcount(tensor)
    dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20.0
    # Gloo's own thread refers to it until the collective has completed
    while sys.getrefcount(tensor) != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()
