"""Snapshots of the CUDA allocator: when they are saved, where, and within which bound."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.features.memory_trace._allocator_history import (
    MOST_ENTRIES,
    AllocatorHistory,
    pickled_within,
)
from grpo_run.runtime.upstream.memory_names import CudaAllocator


class FakeAllocator(CudaAllocator):
    """An allocator with a ring buffer, and a script that may record by itself."""

    def __init__(self, *, recording: bool = False) -> None:
        self.recording = recording
        self.waiting: list[Callable[[], None]] = []
        self.recorded: list[int] = []
        self.observers: list[Callable[[], None]] = []
        self.error: Exception | None = None

    def when_ready(self, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def initialize(self) -> None:
        """The script initializes CUDA."""
        for call in self.waiting:
            call()

    def is_recording(self) -> bool:
        return self.recording

    def record(self, most_entries: int) -> None:
        if self.error is not None:
            raise self.error
        self.recording = True
        self.recorded.append(most_entries)

    def observe_out_of_memory(self, call: Callable[[], None]) -> None:
        self.observers.append(call)

    def snapshot(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        trace = [{"action": "alloc", "addr": 7_000_000_000 + number} for number in range(40)]
        return {"segments": [{"address": 0, "blocks": []}], "device_traces": [trace, trace[:3]]}


class Traced(AllocatorHistory):
    """A history under test, and what it has told."""

    def __init__(self, folder: Path, allocator: FakeAllocator, *, most_bytes: int = 1 << 20) -> None:
        self.saved: list[tuple[str, str]] = []
        self.warned: list[str] = []

        def write(event: Any) -> None:
            path = folder / event.path
            assert (path.stat().st_size, event.entries) == (event.bytes, 43)
            assert (event.rank, event.step, path.parent) == (3, 7, folder / "memory_trace")
            self.saved.append((path.name, event.reason))

        super().__init__(
            folder, 3, step=lambda: 7, write=write, warn=self.warned.append, allocator=allocator,
            most_bytes=most_bytes,
        )  # fmt: skip
        self.await_cuda(None)

    def begin(self) -> None:
        """The script initializes CUDA."""
        allocator = self._allocator
        assert isinstance(allocator, FakeAllocator)
        allocator.initialize()


def test_nothing_is_recorded_before_the_script_has_initialized_cuda(tmp_path: Path) -> None:
    """It would get a context on a device that the script has not chosen."""
    allocator = FakeAllocator()
    traced = Traced(tmp_path, allocator)
    traced.found()
    assert allocator.recorded == traced.saved == []
    traced.begin()
    assert (allocator.recorded, len(allocator.observers)) == ([MOST_ENTRIES], 1)


def test_a_snapshot_is_saved_at_the_first_finding_when_memory_runs_out_and_at_the_end(tmp_path: Path) -> None:
    """Each once in an attempt; nothing replaces that of the exhausted memory. Files are the user's only."""
    allocator = FakeAllocator()
    traced = Traced(tmp_path, allocator)
    traced.begin()
    for _ in range(2):
        traced.found()
        allocator.observers[0]()
    traced.script_ended()
    assert traced.saved == [
        ("rank-3.pickle", "finding"),
        ("rank-3-out-of-memory.pickle", "out of memory"),
        ("rank-3.pickle", "end of the script"),
    ]
    folder = tmp_path / "memory_trace"
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        content = pickle.loads(path.read_bytes())
        assert len(content["device_traces"][0]) == 40
        assert content["segments"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert traced.warned == []


def test_a_history_that_the_script_records_keeps_its_settings(tmp_path: Path) -> None:
    """It is saved as it is; once the script has ended it, nothing is."""
    allocator = FakeAllocator(recording=True)
    traced = Traced(tmp_path, allocator)
    traced.begin()
    traced.found()
    allocator.recording = False
    traced.script_ended()
    assert (len(traced.saved), allocator.recorded) == (1, [])


def test_the_newest_entries_are_kept_within_the_bound() -> None:
    """The oldest go first, of every device alike; without any history the blocks must fit."""
    trace = [{"action": "alloc", "addr": 7_000_000_000 + number} for number in range(1000)]
    snapshot = {"segments": [{"address": 0}], "device_traces": [trace, trace[:10]], "other": 1}
    whole, entries = pickled_within(snapshot, 1 << 20)
    assert entries == 1010
    assert pickle.loads(whole) == snapshot
    content, entries = pickled_within(snapshot, len(whole) // 3)
    kept = pickle.loads(content)
    assert len(content) <= len(whole) // 3
    assert kept["device_traces"][0] == trace[-len(kept["device_traces"][0]) :] != []
    assert entries == len(kept["device_traces"][0]) + 10
    assert kept["other"] == 1
    with pytest.raises(ValueError, match="larger than 500 bytes"):
        pickled_within({"segments": ["x" * 1000], "device_traces": [[]]}, 500)


def test_what_cannot_be_saved_is_a_warning_and_no_error(tmp_path: Path) -> None:
    """An error in the observer would take the place of the one that says that memory has run out."""
    allocator = FakeAllocator()
    traced = Traced(tmp_path, allocator, most_bytes=10)
    traced.begin()
    allocator.error = RuntimeError("invalid argument\nmore")
    allocator.observers[0]()
    allocator.error = None
    traced.found()
    (tmp_path / "memory_trace").write_text("a file where the folder would be")
    traced._most_bytes = 1 << 20
    traced.script_ended()
    assert traced.warned[:2] == [
        "no snapshot of the CUDA allocator is saved: invalid argument",
        "no snapshot of the CUDA allocator is saved: it is larger than 10 bytes",
    ]
    assert (len(traced.warned), traced.saved) == (3, [])


def test_an_allocator_without_history_is_one_warning(tmp_path: Path) -> None:
    """Such as cudaMallocAsync. A process that was forked saves nothing either."""
    allocator = FakeAllocator()
    allocator.error = RuntimeError("cudaMallocAsync does not yet support recordHistory.")
    traced, forked = Traced(tmp_path, allocator), Traced(tmp_path, FakeAllocator())
    traced.begin()
    traced.found()
    (warning,) = traced.warned
    assert "cudaMallocAsync" in warning
    forked.end()
    forked.begin()
    forked.script_ended()
    assert traced.saved == forked.saved == []
