"""A snapshot becomes a checkpoint, or an answer that says why not; nothing in between is ever seen."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from support.slots import fill, snapshot

from grpo_run.runtime.staging import drain_worker
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.drain_messages import DrainFailed, DrainProgress, DrainPublished, DrainRequest
from grpo_run.runtime.staging.drain_worker import read_io_counters, serve


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    """Three empty slots."""
    return StagingArea(tmp_path / "memory")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The script's output directory, which nobody has made yet."""
    return tmp_path / "disk" / "out"


@pytest.fixture
def served(staging: StagingArea, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The other end of a drainer that runs in a thread of this process."""
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "nice", lambda more: more)
    monkeypatch.setattr(drain_worker, "die_with_parent", lambda parent: None)
    mine, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(str(staging.path), theirs, os.getpid()))
    thread.start()
    yield mine
    mine.close()
    thread.join(10.0)
    assert not thread.is_alive(), "it serves on although nobody asks any more"


def test_requests_are_answered_in_their_order(
    staging: StagingArea, out: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress first, one answer each."""
    monkeypatch.setattr(drain_worker, "PROGRESS_SECONDS", 0.0)
    fill(staging.slots[0], snapshot(out, 5))
    served.send(DrainRequest(slot=0))
    served.send(DrainRequest(slot=1))
    answers: list[Any] = []
    while not answers or not isinstance(answers[-1], DrainFailed):
        assert served.poll(10.0)
        answers.append(served.recv())
    kinds = [type(entry) for entry in answers]
    assert kinds[-2:] == [DrainPublished, DrainFailed]
    assert set(kinds[:-2]) == {DrainProgress}


def test_bytes_that_move_are_progress_though_nobody_counts_them(
    staging: StagingArea, out: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One big record; and when none move nothing is said, so that a stall is seen."""
    monkeypatch.setattr(drain_worker, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(drain_worker, "IO_POLL_SECONDS", 0.01)
    looks = iter([b"0", b"0", b"0", b"1"])
    over, seen = threading.Event(), threading.Event()

    def moved(thread_id: int) -> bytes:
        look = next(looks, None)
        if look is None:
            seen.set()
        return look or b"1"

    def silent(*args: Any) -> DrainFailed:
        assert over.wait(10.0)
        return DrainFailed(slot=0, step=5, reason="", full=False)

    monkeypatch.setattr(drain_worker, "read_io_counters", moved)
    monkeypatch.setattr(drain_worker, "handle_request", silent)
    served.send(DrainRequest(slot=0))
    assert seen.wait(10.0)
    over.set()
    answers = [served.recv(), served.recv()]
    assert [type(entry) for entry in answers] == [DrainProgress, DrainFailed]
    assert not served.poll(0.05), "nothing after the answer"


def test_a_threads_bytes_are_counted_by_the_kernel(tmp_path: Path) -> None:
    """As they are written."""
    me = threading.get_native_id()
    before = read_io_counters(me)
    if before is None:
        pytest.skip("this kernel keeps no account of a thread's bytes")
    (tmp_path / "mine").write_bytes(b"x" * 4096)
    assert read_io_counters(me) != before
    assert read_io_counters(1 << 30) is None, "nor of a thread that is not there"


def test_it_ends_when_nobody_hears_the_answer(staging: StagingArea, out: Path, served: Any) -> None:
    """Given up on while it wrote: no traceback, no endless work."""
    fill(staging.slots[0], snapshot(out, 5))
    served.send(DrainRequest(slot=0))
    served.close()
