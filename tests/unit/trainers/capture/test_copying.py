"""Copies into an arena: every byte where it belongs, whatever the pieces and the threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_run.runtime.staging.buffer import SnapshotBuffer
from grpo_run.runtime.staging.headroom import Headroom
from grpo_run.trainers.capture import copying
from grpo_run.trainers.capture.copying import Copy, copy_all, share_of_threads


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SnapshotBuffer]:
    """An arena with room."""
    path = tmp_path_factory.mktemp("memory") / "arena"
    with SnapshotBuffer(
        path, measure=lambda folder: Headroom(name="wide", free_bytes=1 << 40, total_bytes=1 << 40)
    ) as made:
        yield made


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small storage takes several."""
    monkeypatch.setattr(copying, "PIECE_BYTES", 100)


@settings(deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 700), st.integers(0, 50)), min_size=1, max_size=12),
    threads=st.integers(1, 5),
)
def test_every_byte_arrives_and_no_other_changes(
    arena: SnapshotBuffer, parts: list[tuple[int, int]], threads: int
) -> None:
    """Sizes that pieces do not divide, empty ones, and parts from the midst of a storage."""
    arena.begin()
    generator = torch.Generator().manual_seed(sum(size for size, _ in parts))
    copies, wanted = [], []
    for size, start in parts:
        content = torch.randint(0, 256, (start + size,), dtype=torch.uint8, generator=generator)
        offset = arena.allocate(size + 1)
        with arena.view(offset, size + 1) as view:
            view[size] = 77
        copies.append(Copy(content.untyped_storage(), start, offset, size))
        wanted.append(content[start:].numpy().tobytes() + b"M")
    copy_all(arena, copies, threads=threads)
    for copy, content in zip(copies, wanted, strict=True):
        with arena.view(copy.offset, copy.size_bytes + 1) as view:
            assert bytes(view) == content


def test_what_lies_on_a_device_is_copied_by_torch(arena: SnapshotBuffer) -> None:
    """The same bytes, from the midst of a storage too; here the device is the processor."""
    arena.begin()
    content = torch.arange(250, dtype=torch.uint8)
    offset = arena.allocate(100)
    copying._from_device(arena, Copy(content.untyped_storage(), 50, offset, 100))
    with arena.view(offset, 100) as view:
        assert bytes(view) == bytes(range(50, 150))


def test_without_a_thread_to_be_had_all_is_copied(
    arena: SnapshotBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may limit them; a save does not fail for it."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    arena.begin()
    content = torch.arange(250, dtype=torch.uint8)
    offset = arena.allocate(250)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    copy_all(arena, [Copy(content.untyped_storage(), 0, offset, 250)], threads=3)
    with arena.view(offset, 250) as view:
        assert bytes(view) == bytes(range(250))


def test_the_copying_threads_are_gone_afterwards(arena: SnapshotBuffer) -> None:
    """A data loader forked later must not find locks of threads that it does not have."""
    arena.begin()
    before = threading.active_count()
    storage = torch.ones(1000, dtype=torch.uint8).untyped_storage()
    copy_all(arena, [Copy(storage, 0, arena.allocate(1000), 1000)], threads=3)
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("cores", "local_ranks", "threads"), [(2, 1, 2), (2, 2, 1), (2, 8, 1), (96, 8, 8), (40, 8, 5), (1, 1, 1)]
)
def test_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, local_ranks: int, threads: int
) -> None:
    """At least one each, at most eight."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert share_of_threads(local_ranks) == threads
