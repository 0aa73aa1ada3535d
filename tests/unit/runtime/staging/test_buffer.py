"""A rank's memory for checkpoints: taken before it is used, used again, and refused cleanly."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.runtime.errors import CheckpointError, NoRoomError
from grpo_run.runtime.staging import buffer as arenas
from grpo_run.runtime.staging.buffer import (
    ALIGNMENT_BYTES,
    GROWTH_BYTES,
    SnapshotBuffer,
    SnapshotBufferReader,
    aligned,
)
from grpo_run.runtime.staging.headroom import Headroom

MIB = 1 << 20


def wide(folder: Path) -> Headroom:
    """A limit that never binds."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the arena is."""
    return tmp_path / "rank0.arena"


@pytest.fixture
def arena(path: Path) -> Iterator[SnapshotBuffer]:
    """An empty arena."""
    with SnapshotBuffer(path, measure=wide) as made:
        yield made


def test_what_is_appended_is_read(arena: SnapshotBuffer, path: Path) -> None:
    """By another mapping of the same file."""
    offsets = [arena.append(data) for data in (b"first", bytearray(b"second"), memoryview(b"third!"))]
    with SnapshotBufferReader(path) as reader:
        assert [bytes(reader.view(offset, 5)) for offset in offsets] == [b"first", b"secon", b"third"]


def test_records_are_aligned(arena: SnapshotBuffer) -> None:
    """Each begins on a cache line of its own; `aligned` says what it takes."""
    offsets = [arena.append(b"x" * size) for size in (1, 64, 65, 0, 3)]
    assert offsets == [0, 64, 128, 256, 256]
    assert arena.allocate(0) == sum(aligned(size) for size in (1, 64, 65, 0, 3)) == 320
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)


def test_wide_elements_are_copied_as_bytes(arena: SnapshotBuffer) -> None:
    """A buffer's length is not its number of bytes."""
    offset = arena.append(memoryview(bytearray(b"abcdefgh")).cast("I"))
    assert bytes(arena.view(offset, 8)) == b"abcdefgh"


def test_the_file_has_no_holes(arena: SnapshotBuffer, path: Path) -> None:
    """A write to a hole of a full file system would be SIGBUS."""
    arena.reserve(10 * MIB)
    status = path.stat()
    assert status.st_size == arena.held_bytes == 12 * MIB
    assert status.st_blocks * 512 >= status.st_size


def test_the_file_is_this_users_alone(arena: SnapshotBuffer, path: Path) -> None:
    """The folder it is in is everyone's."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_growth_keeps_what_is_there(arena: SnapshotBuffer) -> None:
    """Also a view taken before, as nothing is mapped again."""
    offset = arena.append(b"early")
    early = arena.view(offset, 5)
    for _ in range(3):
        arena.allocate(GROWTH_BYTES)
    early[:1] = b"E"
    assert bytes(arena.view(offset, 5)) == b"Early"
    assert arena.held_bytes == 4 * GROWTH_BYTES
    early.release()


def test_memory_is_used_again(arena: SnapshotBuffer) -> None:
    """A smaller checkpoint keeps it, a larger one takes only what is missing."""
    arena.allocate(10 * MIB)
    held = arena.held_bytes
    arena.begin()
    assert arena.held_bytes == held
    assert arena.append(b"again") == 0
    arena.begin()
    arena.allocate(held)
    assert arena.held_bytes == held
    arena.append(b"more")
    assert arena.held_bytes == held + GROWTH_BYTES


def test_reserving_ahead_appends_nothing(arena: SnapshotBuffer) -> None:
    """What it reserved is used by what comes next."""
    arena.reserve(5 * MIB)
    held = arena.held_bytes
    assert arena.allocate(5 * MIB) == 0
    assert arena.held_bytes == held


def test_a_files_memory_is_taken_over(path: Path) -> None:
    """A rank that starts again neither loses what is not yet drained nor takes memory twice."""
    with SnapshotBuffer(path, measure=wide) as first:
        first.append(b"undrained")
        held = first.held_bytes
    with SnapshotBuffer(path, measure=wide) as second:
        assert second.held_bytes == held
        assert bytes(second.view(0, 9)) == b"undrained"
        assert second.allocate(held) == 0
        assert path.stat().st_size == held


def test_an_opening_that_was_interrupted_loses_nothing(path: Path) -> None:
    """The file is longer for a moment; a rank killed in it left a hole behind what it holds."""
    with SnapshotBuffer(path, measure=wide) as arena:
        offset = arena.append(b"kept")
        held = arena.held_bytes
    os.truncate(path, 1 << 30)
    with SnapshotBuffer(path, measure=wide) as arena:
        assert arena.held_bytes == held
    assert path.stat().st_size == held
    with SnapshotBufferReader(path) as reader:
        assert bytes(reader.view(offset, 4)) == b"kept"


def test_a_file_with_holes_is_emptied(path: Path) -> None:
    """Its pages could not be written without taking room."""
    with open(path, "wb") as file:
        file.truncate(64 * MIB)
    with SnapshotBuffer(path, measure=wide) as arena:
        assert arena.held_bytes == path.stat().st_size == 0


def test_no_room_is_found_before_it_is_taken(path: Path) -> None:
    """The limit is named, and the arena is as it was."""
    room = Headroom(name="a small limit", free_bytes=(64 + 8) * MIB, total_bytes=200 * MIB)
    with SnapshotBuffer(path, measure=lambda folder: room) as arena:
        offset = arena.append(b"kept")
        with pytest.raises(
            NoRoomError, match=r"needs 20 MiB more, but a small limit has 72 MiB free.* 8 MiB"
        ):
            arena.allocate(20 * MIB)
        assert arena.held_bytes == GROWTH_BYTES
        assert path.stat().st_size == GROWTH_BYTES
        assert bytes(arena.view(offset, 4)) == b"kept"
        assert arena.allocate(1 * MIB) == 64


def test_room_that_vanishes_meanwhile_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may fill the file system between the question and the reservation."""
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 12 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, offset + size)

    with SnapshotBuffer(path, measure=wide) as arena:
        arena.append(b"kept")
        monkeypatch.setattr(arenas, "RESERVATION_BYTES", 4 * MIB)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoRoomError, match="No space left on device"):
            arena.allocate(30 * MIB)
        assert path.stat().st_size == arena.held_bytes == GROWTH_BYTES
        monkeypatch.setattr(os, "posix_fallocate", real)
        assert bytes(arena.view(0, 4)) == b"kept"


def test_what_is_no_question_of_room_is_not_called_one(
    arena: SnapshotBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken device is not cured by writing directly."""

    def broken(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        arena.reserve(1)


def test_a_limit_on_file_sizes_is_no_room(path: Path) -> None:
    """The kernel's own refusal; the signal that comes with it ends nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SnapshotBuffer(path, measure=wide) as arena:
        arena.append(b"kept")
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))
        try:
            with pytest.raises(NoRoomError, match="File too large"):
                arena.allocate(16 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert bytes(arena.view(0, 4)) == b"kept"
        assert path.stat().st_size == arena.held_bytes == GROWTH_BYTES


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """In a folder that everyone writes to, it could lead to any file of this user."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SnapshotBuffer(path)
    assert victim.read_bytes() == b"precious"


def test_a_strangers_file_is_not_used(
    arena: SnapshotBuffer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who made it could read the weights."""
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match="not a regular file of this user"):
        SnapshotBufferReader(path)


def test_a_reader_cannot_write(arena: SnapshotBuffer, path: Path) -> None:
    """It maps the file for reading."""
    arena.append(b"data")
    with SnapshotBufferReader(path) as reader, reader.view(0, 4) as view:
        assert view.readonly


@pytest.mark.parametrize(
    ("offset", "size"), [(-64, 64), (0, GROWTH_BYTES + 1), (GROWTH_BYTES, 1), (0, -1), (1 << 62, 1 << 62)]
)
def test_a_record_outside_is_refused(arena: SnapshotBuffer, path: Path, offset: int, size: int) -> None:
    """An index may be damaged, or of a file that was cut."""
    arena.append(b"data")
    with SnapshotBufferReader(path) as reader, pytest.raises(CheckpointError, match="but a record has"):
        reader.view(offset, size)


def test_an_empty_arena_cannot_be_read(arena: SnapshotBuffer, path: Path) -> None:
    """There is nothing in it."""
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        SnapshotBufferReader(path)


def test_a_missing_arena_cannot_be_read(path: Path) -> None:
    """It is named."""
    with pytest.raises(CheckpointError, match=r"rank0\.arena cannot be opened: No such file"):
        SnapshotBufferReader(path)
