"""The board: a reader sees exactly what a rank has written, or nothing."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
import struct
import threading
import time
from pathlib import Path

import pytest
from support.boards import seen
from support.collective_entries import add_entry

from grpo_run.runtime.board._duration_table import TABLE_BYTES
from grpo_run.runtime.board._header import HEADER_BYTES
from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board._storage import BoardFile
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.collective_log import ENTRIES, LOG_BYTES, is_blocked, may_be_in_collective
from grpo_run.runtime.board.exchange import EXCHANGE_BYTES
from grpo_run.runtime.board.memory_area import MEMORY_AREA_BYTES
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState


def test_a_slot_identifies_its_rank(board: Board, writer: SlotWriter) -> None:
    """A new slot has global rank, local rank, pid and attempt."""
    slot = seen(board)
    assert (slot.rank, slot.local_rank, slot.pid, slot.attempt) == (5, 1, 4711, 3)
    assert slot.state is RankState.starting
    assert slot.phases == ()


def test_the_file_is_private(tmp_path: Path) -> None:
    """Its mode is 0600 for any umask."""
    before = os.umask(0)
    try:
        Board.create(tmp_path / "board.mmap", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "board.mmap").stat().st_mode) == 0o600


def test_creating_replaces_by_rename(tmp_path: Path) -> None:
    """A reader of the old board keeps its mapping; no temporary file remains."""
    path = tmp_path / "board.mmap"
    old = Board.create(path, 1)
    old.writer(0, rank=0, pid=1, attempt=0)
    new = Board.create(path, 2)
    assert old.read(0) is not None
    assert new.read_all() == [None, None]
    assert [file.name for file in tmp_path.iterdir()] == ["board.mmap"]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    """Read-only commands open the file read-only."""
    Board.create(tmp_path / "board.mmap", 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Board.open(tmp_path / "board.mmap").request_stop()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no readable board"),
        (b"", "not a board"),
        (b"GRPOBRD4", "not a board"),
        (b"SOMETHING" + bytes(HEADER_BYTES + SLOT_BYTES), "not a board"),
        (b"GRPOBRD4" + struct.pack("<II", 2, SLOT_BYTES) + bytes(HEADER_BYTES), "truncated"),
        (b"GRPOBRD4" + struct.pack("<II", 1, 512) + bytes(HEADER_BYTES + SLOT_BYTES), "another version"),
    ],
)
def test_a_file_that_is_no_board_is_rejected(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """Missing, empty, foreign, truncated or of another layout: the error is one line with the path."""
    path = tmp_path / "board.mmap"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=reason) as refused:
        Board.open(path)
    assert str(path) in str(refused.value)


def test_a_slot_index_out_of_range_is_rejected(board: Board) -> None:
    """A wrong local rank must not write to another slot or past the end."""
    for index in (-1, 2):
        with pytest.raises(IndexError):
            board.writer(index, rank=0, pid=1, attempt=0)


def test_the_collective_log_belongs_to_its_slot(board: Board, writer: SlotWriter) -> None:
    """The reading has the number of entries; another slot has none; the other fields do not change."""
    before, began = seen(board), time.monotonic()
    for sequence in range(1, 301):
        add_entry(writer.collective_log, sequence=sequence)
    after = seen(board)
    assert began <= after.last_collective_seconds <= time.monotonic()
    last = after.last_collective_seconds
    expected = dataclasses.replace(before, collectives_issued=300, last_collective_seconds=last)
    assert repr(after) == repr(expected)
    assert board.collective_log(1)[-1].sequence == 300
    assert board.collective_log(0) == ()
    assert board.read(0) is None


def may_wait(board: Board) -> bool:
    """Whether the log leaves open that local rank 1 is in a collective."""
    return may_be_in_collective(board.copy_log(1), seen(board).collectives_issued)


def log_collective(
    writer: SlotWriter,
    *,
    operation: str = "allreduce",
    on_device: bool = False,
    progress: CollectiveProgress = CollectiveProgress.enqueued,
) -> int:
    """Log one collective and return its number."""
    return add_entry(writer.collective_log, operation=operation, on_device=on_device, progress=progress)


def test_a_wait_is_seen_at_every_place_of_the_ring(board: Board, writer: SlotWriter) -> None:
    """The entry may be the first, the last, or one written after the ring has wrapped.

    An overwritten entry no longer counts.
    """
    for _ in range(ENTRIES + 2):
        number = log_collective(writer)
        writer.collective_log.mark(number, CollectiveProgress.waiting)
        assert may_wait(board)
        writer.collective_log.mark(number, CollectiveProgress.completed)
        assert not may_wait(board)
    writer.collective_log.mark(log_collective(writer), CollectiveProgress.waiting)
    for _ in range(ENTRIES - 1):
        log_collective(writer)
        assert may_wait(board)
    log_collective(writer)
    assert not may_wait(board)


@pytest.mark.parametrize("progress", list(CollectiveProgress))
def test_the_last_entry_on_a_device_may_be_in_progress(
    board: Board, writer: SlotWriter, progress: CollectiveProgress
) -> None:
    """The host does not see when it completes.

    A later entry on the host shows that the rank has continued.
    """
    log_collective(writer, on_device=True, progress=progress)
    assert may_wait(board)
    log_collective(writer, progress=CollectiveProgress.completed)
    assert may_wait(board) is (progress is CollectiveProgress.waiting)


def test_a_new_attempt_begins_with_an_empty_board(board: Board, writer: SlotWriter) -> None:
    """Without slots, requests, log and durations; as does a slot that is claimed again in one attempt."""

    def fill(writer: SlotWriter) -> None:
        writer.replace(Phase.data)
        writer.replace(Phase.vote)
        writer.enter_callback("Upload.on_save")
        writer.leave(Phase.callback)
        add_entry(writer.collective_log)

    fill(writer)
    fill(board.writer(1, rank=5, pid=4712, attempt=3))
    assert board.durations(1)[Phase.data].count == 0
    assert len(board.collective_log(1)) == 1
    board.request_stop()
    board.begin_attempt(4)
    assert (board.collective_log(1), board.durations(1)) == ((), {})
    assert board.read_all() == [None, None]
    assert (board.attempt, board.requests[0]) == (4, False)


@pytest.mark.parametrize("size", [0, 8, HEADER_BYTES, HEADER_BYTES + SLOT_BYTES + 1000])
def test_a_truncated_board_reads_as_if_no_rank_had_written(tmp_path: Path, size: int) -> None:
    """Also between two reads of one scan; access to a mapping would end this process with SIGBUS."""
    path = tmp_path / "board.mmap"
    board, reader = Board.create(path, 2), Board.open(path)
    writer = board.writer(1, rank=1, pid=4711, attempt=0)
    writer.enter(Phase.generate)
    writer.replace(Phase.vote)
    add_entry(writer.collective_log, progress=CollectiveProgress.waiting)
    writer.memory_area.publish()
    board.request_stop()
    board.ask_to_stop()
    for one in (board, reader):
        assert seen(one).collectives_issued == 1
        assert is_blocked(one.copy_log(1))
        assert one.durations(1)
    path.rename(tmp_path / "elsewhere")
    assert board.has_full_size
    os.truncate(tmp_path / "elsewhere", size)
    for one in (board, reader):
        assert not one.has_full_size
        assert one.read_all()[1] is None
        assert not is_blocked(one.copy_log(1))
        assert not may_be_in_collective(one.copy_log(1), 1)
        assert one.copy_log(1) == bytes(LOG_BYTES)
        assert one.collective_log(1) == ()
        assert one.durations(1) == one.messages_sent(1) == {}
        assert one.rank_memory(1) is None
        assert one.read_awaited() is None
        if size < HEADER_BYTES:
            assert (one.attempt, one.requests, one.memory_is_short) == (0, (False, 0), False)
            assert not one.take_stop()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """Of the supervisor's boards, of which every truncation makes one more, and of a rank's, which a script
    may close.
    """
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        board = Board.create(tmp_path / "board.mmap", 1)
    rank = Board.map(tmp_path / "board.mmap")
    del board
    rank.writer(0, rank=0, pid=1, attempt=0).publish()
    assert rank.read(0) is not None
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1  # the mapping's own


def test_a_full_disk_is_reported_before_the_file_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole would raise SIGBUS in the supervisor later; the descriptor is closed."""
    path = tmp_path / "board.mmap"
    opened: list[int] = []

    def full(descriptor: int, offset: int, length: int) -> None:
        opened.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunDirectoryError, match=rf"the board cannot be made at {path}: No space left"):
        Board.create(path, 2)
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_every_byte_of_a_new_board_is_allocated(tmp_path: Path) -> None:
    """The file is as long as header, slots, tables of durations, exchange areas and memory areas."""
    path = tmp_path / "board.mmap"
    Board.create(path, 3)
    told = path.stat()
    assert told.st_size == HEADER_BYTES + 3 * (SLOT_BYTES + TABLE_BYTES + EXCHANGE_BYTES + MEMORY_AREA_BYTES)
    assert told.st_blocks * 512 >= told.st_size


def test_a_forked_child_does_not_change_the_board(board: Board, writer: SlotWriter, tmp_path: Path) -> None:
    """It inherits the rank's mapping and is not the rank."""
    writer.replace(Phase.data)
    number = log_collective(writer, progress=CollectiveProgress.waiting)
    before = (tmp_path / "board.mmap").read_bytes()
    writer.detach()
    writer.heartbeat()
    writer.record_work()
    writer.state, writer.step, writer.tokens_generated = RankState.done, 99, 5
    writer.publish()
    writer.memory_area.publish()
    for _ in range(2):
        writer.enter_callback("Upload.on_save")
        writer.leave(Phase.callback)
        writer.replace(Phase.generate)
    writer.collective_log.mark(number, CollectiveProgress.completed)
    writer.collective_log.mark(log_collective(writer), CollectiveProgress.completed)
    assert (tmp_path / "board.mmap").read_bytes() == before
    assert seen(board).phase is Phase.data


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent(board: Board, writer: SlotWriter) -> None:
    """Another thread held the log's lock at the time of the fork."""
    writing, resume = threading.Event(), threading.Event()

    class Slow(str):
        """Text whose encoding takes until it is told to continue."""

        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            writing.set()
            resume.wait(10)
            return super().encode(encoding, errors)

    parent = threading.Thread(
        target=log_collective, args=(writer,), kwargs={"operation": Slow("all_reduce")}, daemon=True
    )
    parent.start()
    assert writing.wait(10)
    writer.detach()
    child = threading.Thread(target=log_collective, args=(writer,), daemon=True)
    child.start()
    child.join(10)
    assert not child.is_alive()
    resume.set()
    parent.join(10)


def test_a_board_knows_whether_ranks_would_map_it(tmp_path: Path) -> None:
    """Not if its file was removed, or replaced by a copy, as when a run directory is moved and put back."""
    path = tmp_path / "board.mmap"
    board = Board.create(path, 1)
    assert board.is_at(path)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    copy.replace(path)
    assert not board.is_at(path)
    path.unlink()
    assert not board.is_at(path)


def test_a_board_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    """As on a disk with errors; nothing is raised in the supervisor."""
    path = tmp_path / "board.mmap"
    Board.create(path, 1).writer(0, rank=0, pid=1, attempt=0).publish()
    contents = BoardFile(os.open(path, os.O_RDWR), path.stat().st_size, writable=True)
    board = Board(contents, 1)
    assert board.read(0) is not None
    contents.close()  # each access to the file fails from now on
    assert board.read_all() == [None]
    assert contents.read(0, 8) == bytes(8)
    assert not board.has_full_size
    assert not board.is_at(path)
    board.write_awaited(None)


@pytest.fixture
def reads_miss_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read calls see what write calls have written, and nothing else."""
    written: dict[int, int] = {}
    pwrite = os.pwrite

    def write(descriptor: int, content: bytes, offset: int) -> int:
        written.update(enumerate(content, offset))
        return pwrite(descriptor, content, offset)

    def read(descriptor: int, size: int, offset: int) -> bytes:
        return bytes(written.get(at, 0) for at in range(offset, offset + size))

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "pread", read)


@pytest.mark.usefixtures("reads_miss_mappings")
def test_a_file_system_where_read_calls_miss_what_ranks_write_is_refused(tmp_path: Path) -> None:
    """A hang would go unseen otherwise."""
    with pytest.raises(RunDirectoryError, match="choose another with --run-dir"):
        Board.create(tmp_path / "board.mmap", 1)


def test_the_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    """On other file systems."""
    Board.create(tmp_path / "board.mmap", 1)
    header = (tmp_path / "board.mmap").read_bytes()[56:256]
    assert header == bytes(len(header))
