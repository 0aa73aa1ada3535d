"""An entry says whether its collective is waited for, and for how long."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.builders.trainers.recorded_collectives import Handle, entries
from torch._C._distributed_c10d import AllreduceOptions

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.collective_recorder import MAX_TRACKED, Recorder
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress


def test_a_collective_is_complete_after_its_wait(installed: Recorder, board: Board) -> None:
    """A synchronous collective at once; an asynchronous one when its handle has been waited for."""
    dist.all_reduce(torch.ones(1))
    assert entries(board)[-1].progress is CollectiveProgress.completed
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_an_entry_is_waiting_while_a_thread_waits(
    recorder: Recorder, board: Board, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the thread's id, as seen from inside the wait."""
    seen: list[CollectiveProgress] = []
    waiters: list[str] = []

    class Work:
        """A handle whose wait reads the board."""

        def wait(self) -> bool:
            seen.append(entries(board)[-1].progress)
            waiters.append(entries(board)[-1].thread)
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    call = recorder.log(dist.group.WORLD, "allreduce", ([torch.ones(1)],))
    recorder.track(work, call.number, call.on_host)
    assert work.wait() is True
    assert seen == [CollectiveProgress.waiting]
    assert waiters == [str(threading.get_ident())]
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_failed_wait_leaves_the_entry_incomplete_and_not_waiting(recorder: Recorder, board: Board) -> None:
    """As when a peer is gone. The error is torch's own."""

    class Work:
        """A handle whose peer is gone."""

        def wait(self) -> bool:
            raise RuntimeError("Connection closed by peer")

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_a_wait_on_a_device_does_not_complete_the_entry(recorder: Recorder, board: Board) -> None:
    """It orders streams and returns; the Flight Recorder knows when the work is done."""

    class Work:
        """A handle of work on a device."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    number = recorder._add("0", 1, "allreduce", [], 0b11, sys._getframe())
    recorder.track(work, number, False)
    work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_only_the_first_wait_is_marked(recorder: Recorder, board: Board) -> None:
    """A second wait on the same handle returns at once. A handle that is not tracked is passed through."""

    class Work:
        """A handle."""

        def wait(self) -> bool:
            return True

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    work = Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0)
    assert work.wait()
    assert work.wait()
    assert Work().wait()
    assert [entry.progress for entry in entries(board)] == [CollectiveProgress.completed]


def test_the_oldest_tracked_handles_are_dropped(recorder: Recorder) -> None:
    """A script may never wait for some."""
    works = [Handle() for _ in range(MAX_TRACKED + 10)]
    for number, work in enumerate(works, 1):
        recorder.track(work, number, True)
    assert len(recorder._tracked) == MAX_TRACKED
    assert id(works[0]) not in recorder._tracked
    number, on_host, tracked = recorder._tracked[id(works[-1])]
    assert (number, on_host, tracked()) == (len(works), True, works[-1])


def test_a_new_handle_at_the_address_of_a_freed_one_is_not_tracked(recorder: Recorder, board: Board) -> None:
    """Its wait must not mark the entry of the freed handle."""

    class Work:
        """A handle whose wait reads the board."""

        def wait(self) -> CollectiveProgress:
            return entries(board)[-1].progress

    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Work))
    dropped, send = Work(), Work()
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), dropped, members=0)
    recorder._tracked[id(send)] = recorder._tracked.pop(id(dropped))
    del dropped
    assert send.wait() is CollectiveProgress.enqueued
    assert entries(board)[-1].progress is CollectiveProgress.enqueued


def test_tracking_keeps_no_tensor_alive(installed: Recorder) -> None:
    """A handle refers to its tensors, which occupy device memory."""
    tensor = torch.ones(1)
    before = sys.getrefcount(tensor)
    dist.all_reduce(tensor, async_op=True)
    deadline = time.monotonic() + 20.0
    while (
        sys.getrefcount(tensor) != before
    ):  # Gloo's own thread refers to it until the collective has completed
        assert time.monotonic() < deadline
        time.sleep(0.01)
        gc.collect()


class Waited:
    """A handle. `after` lists what each wait does; the last entry repeats."""

    def __init__(self, board: Board, *after: Exception | None) -> None:
        self.board, self.after, self.seen, self.given = (
            board,
            list(after),
            list[CollectiveProgress](),
            list[Any](),
        )

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        """Read the board, and raise if `after` says so."""
        self.seen.append(entries(self.board)[-1].progress)
        self.given.append((args, kwargs))
        error = self.after.pop(0) if self.after else None
        if error is not None:
            raise error
        return True


@pytest.fixture
def waited(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> type[Waited]:
    """The class, installed in place of torch's `Work`; its own `wait` is restored."""
    monkeypatch.setattr(Waited, "wait", Waited.wait)
    recorder.install(SimpleNamespace(ProcessGroup=type("ProcessGroup", (), {}), Work=Waited))
    return Waited


def test_a_time_limit_of_the_script_is_recorded(installed: Recorder, board: Board) -> None:
    """Such a collective ends by itself, so it proves no hang. A script may call the group's methods, or
    torch's functions.
    """
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=30)
    group = dist.distributed_c10d._get_default_group()
    group.allreduce([torch.ones(2)], options).wait()
    group.allreduce([torch.ones(2)]).wait()
    dist.barrier(timeout=timedelta(seconds=30))
    dist.all_reduce(torch.ones(2))
    limits = [entry.timeout_seconds for entry in entries(board)[-4:]]
    assert limits == [0.0, math.inf, 0.0, math.inf]


@pytest.mark.parametrize(("args", "kwargs"), [((3.0,), {}), ((), {"timeout": 3.0})])
def test_a_wait_with_a_time_limit_is_not_marked(
    recorder: Recorder, board: Board, waited: type[Waited], args: Any, kwargs: Any
) -> None:
    """It will return. A wait without a limit afterwards is marked."""
    work = waited(board, RuntimeError("timed out"))
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(*args, **kwargs)
    work.wait()
    assert work.given == [(args, kwargs), ((), {})]
    assert work.seen == [CollectiveProgress.enqueued, CollectiveProgress.waiting]
    assert entries(board)[-1].progress is CollectiveProgress.completed


def test_a_second_wait_after_a_failed_one_is_marked_too(
    recorder: Recorder, board: Board, waited: type[Waited]
) -> None:
    """The first one may have been interrupted. The handle is released when a wait returns."""
    work = waited(board, RuntimeError("interrupted"))
    recorder.log_own("grpo_run/vote", 1, "allreduce", torch.ones(8), work, members=0b11)
    with pytest.raises(RuntimeError, match="interrupted"):
        work.wait()
    assert entries(board)[-1].progress is CollectiveProgress.enqueued
    work.wait()
    assert work.seen == [CollectiveProgress.waiting, CollectiveProgress.waiting]
    assert entries(board)[-1].progress is CollectiveProgress.completed
    assert recorder._tracked == {}
