"""Every byte is copied to its offset, for any chunk size and number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_run.runtime.rank.saving import copying
from grpo_run.runtime.rank.saving.copying import Copy, copy_all, copy_threads
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer
from grpo_run.runtime.snapshots.headroom import Headroom


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SnapshotBuffer]:
    """An empty buffer without a limit."""
    path = tmp_path_factory.mktemp("memory") / "buffer"
    with SnapshotBuffer(
        path, measure=lambda folder: Headroom(name="wide", free_bytes=1 << 40, total_bytes=1 << 40)
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split small storages into several chunks."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", 100)


@settings(deadline=None)
@given(
    slices=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 50)), min_size=1, max_size=12),
    threads=st.integers(1, 5),
)
def test_every_byte_is_copied_and_no_other_byte_changes(
    buffer: SnapshotBuffer, slices: list[tuple[int, int]], threads: int
) -> None:
    """Holds for sizes that are no multiple of a chunk, empty copies and slices of a storage."""
    buffer.begin()
    generator = torch.Generator().manual_seed(sum(size for size, _ in slices))
    copies, expected = [], []
    for size, start in slices:
        content = torch.randint(0, 256, (start + size,), dtype=torch.uint8, generator=generator)
        offset = buffer.allocate(size + 1)
        with buffer.view(offset, size + 1) as view:
            view[size] = 77
        copies.append(Copy(content.untyped_storage(), start, offset, size))
        expected.append(content[start:].numpy().tobytes() + b"M")
    copy_all(buffer, copies, threads=threads)
    for copy, content in zip(copies, expected, strict=True):
        with buffer.view(copy.offset, copy.size_bytes + 1) as view:
            assert bytes(view) == content


def test_device_memory_is_copied_by_torch(buffer: SnapshotBuffer) -> None:
    """A slice of a storage is copied; in this test the device is the CPU."""
    buffer.begin()
    content = torch.arange(250, dtype=torch.uint8)
    offset = buffer.allocate(100)
    copying._copy_from_device(buffer, Copy(content.untyped_storage(), 50, offset, 100))
    with buffer.view(offset, 100) as view:
        assert bytes(view) == bytes(range(50, 150))


def test_everything_is_copied_if_no_thread_can_be_started(
    buffer: SnapshotBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may limit the number of threads; the save still succeeds."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    buffer.begin()
    content = torch.arange(250, dtype=torch.uint8)
    offset = buffer.allocate(250)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    copy_all(buffer, [Copy(content.untyped_storage(), 0, offset, 250)], threads=3)
    with buffer.view(offset, 250) as view:
        assert bytes(view) == bytes(range(250))


def test_the_copying_threads_end_with_the_copy(buffer: SnapshotBuffer) -> None:
    """A data loader that is forked later must not inherit locks held by these threads."""
    buffer.begin()
    before = threading.active_count()
    storage = torch.ones(1000, dtype=torch.uint8).untyped_storage()
    copy_all(buffer, [Copy(storage, 0, buffer.allocate(1000), 1000)], threads=3)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("cores", "local_ranks", "threads"), [(2, 1, 2), (2, 2, 1), (2, 8, 1), (96, 8, 8), (40, 8, 5), (1, 1, 1)]
)
def test_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, local_ranks: int, threads: int
) -> None:
    """Each rank uses at least one thread and at most eight."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert copy_threads(local_ranks) == threads
