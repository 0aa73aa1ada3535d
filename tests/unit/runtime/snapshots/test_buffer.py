"""Snapshot buffers: memory is taken before it is used, reused, and refused without side effects."""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.runtime.errors import CheckpointError, NoHeadroomError
from grpo_run.runtime.snapshots import buffer as buffer_module
from grpo_run.runtime.snapshots.buffer import (
    ALIGNMENT_BYTES,
    GROWTH_BYTES,
    SnapshotBuffer,
    SnapshotBufferReader,
    aligned,
    free_memory,
)
from grpo_run.runtime.snapshots.headroom import Headroom

MIB = 1 << 20


def wide(folder: Path) -> Headroom:
    """A limit that never binds."""
    return Headroom(name="a wide limit", free_bytes=1 << 40, total_bytes=1 << 40)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The buffer's file."""
    return tmp_path / "rank0.buffer"


@pytest.fixture
def buffer(path: Path) -> Iterator[SnapshotBuffer]:
    """An empty buffer."""
    with SnapshotBuffer(path, measure=wide) as created:
        yield created


def test_appended_records_are_read_through_another_mapping(buffer: SnapshotBuffer, path: Path) -> None:
    """Bytes, bytearrays and memoryviews."""
    offsets = [buffer.append(data) for data in (b"first", bytearray(b"second"), memoryview(b"third!"))]
    with SnapshotBufferReader(path) as reader:
        assert [bytes(reader.view(offset, 5)) for offset in offsets] == [b"first", b"secon", b"third"]


def test_records_start_at_multiples_of_the_alignment(buffer: SnapshotBuffer) -> None:
    """`aligned` returns the space that each record takes."""
    offsets = [buffer.append(b"x" * size) for size in (1, 64, 65, 0, 3)]
    assert offsets == [0, 64, 128, 256, 256]
    assert buffer.allocate(0) == sum(aligned(size) for size in (1, 64, 65, 0, 3)) == 320
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)


def test_a_view_of_wide_elements_is_copied_as_bytes(buffer: SnapshotBuffer) -> None:
    """Its length is not its size in bytes."""
    offset = buffer.append(memoryview(bytearray(b"abcdefgh")).cast("I"))
    assert bytes(buffer.view(offset, 8)) == b"abcdefgh"


def test_the_file_has_no_holes(buffer: SnapshotBuffer, path: Path) -> None:
    """A write to a hole of a full file system raises SIGBUS."""
    buffer.reserve(10 * MIB)
    status = path.stat()
    assert status.st_size == buffer.held_bytes == 12 * MIB
    assert status.st_blocks * 512 >= status.st_size


def test_only_the_user_can_read_the_file(buffer: SnapshotBuffer, path: Path) -> None:
    """Its folder may be world-writable."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_growth_keeps_records_and_views(buffer: SnapshotBuffer) -> None:
    """The mapping does not move."""
    offset = buffer.append(b"early")
    early = buffer.view(offset, 5)
    for _ in range(3):
        buffer.allocate(GROWTH_BYTES)
    early[:1] = b"E"
    assert bytes(buffer.view(offset, 5)) == b"Early"
    assert buffer.held_bytes == 4 * GROWTH_BYTES
    early.release()


def test_memory_is_reused_by_the_next_snapshot(buffer: SnapshotBuffer) -> None:
    """A larger snapshot takes only the missing memory."""
    buffer.allocate(10 * MIB)
    held = buffer.held_bytes
    buffer.begin()
    assert buffer.held_bytes == held
    assert buffer.append(b"again") == 0
    buffer.begin()
    buffer.allocate(held)
    assert buffer.held_bytes == held
    buffer.append(b"more")
    assert buffer.held_bytes == held + GROWTH_BYTES


def test_reserving_appends_nothing(buffer: SnapshotBuffer) -> None:
    """The next records use the reserved memory."""
    buffer.reserve(5 * MIB)
    held = buffer.held_bytes
    assert buffer.allocate(5 * MIB) == 0
    assert buffer.held_bytes == held


def test_an_existing_file_keeps_its_memory_and_contents(path: Path) -> None:
    """A restarted rank neither loses an undrained snapshot nor takes memory twice."""
    with SnapshotBuffer(path, measure=wide) as first:
        first.append(b"undrained")
        held = first.held_bytes
    with SnapshotBuffer(path, measure=wide) as second:
        assert second.held_bytes == held
        assert bytes(second.view(0, 9)) == b"undrained"
        assert second.allocate(held) == 0
        assert path.stat().st_size == held


def test_a_kill_while_opening_loses_no_record(path: Path) -> None:
    """The file is longer for a moment, with a hole at its end."""
    with SnapshotBuffer(path, measure=wide) as buffer:
        offset = buffer.append(b"kept")
        held = buffer.held_bytes
    os.truncate(path, 1 << 30)
    with SnapshotBuffer(path, measure=wide) as buffer:
        assert buffer.held_bytes == held
    assert path.stat().st_size == held
    with SnapshotBufferReader(path) as reader:
        assert bytes(reader.view(offset, 4)) == b"kept"


def test_a_file_that_starts_with_a_hole_is_truncated(path: Path) -> None:
    """Its pages could not be written without taking memory."""
    with open(path, "wb") as file:
        file.truncate(64 * MIB)
    with SnapshotBuffer(path, measure=wide) as buffer:
        assert buffer.held_bytes == path.stat().st_size == 0


def test_freed_memory_is_taken_again_for_the_next_snapshot(path: Path) -> None:
    """While a rank has the buffer mapped: it may write to what it reserved, and measures the limits before it reserves again."""
    measured = 0

    def measure(folder: Path) -> Headroom:
        nonlocal measured
        measured += 1
        return wide(folder)

    with SnapshotBuffer(path, measure=measure) as buffer:
        buffer.append(b"x" * 20 * MIB)
        before = measured
        buffer.begin()
        buffer.append(b"y" * 20 * MIB)
        assert measured == before
        free_memory(path)
        assert path.stat().st_blocks == 0
        with buffer.view(0, 4) as view:
            assert bytes(view) == bytes(4)
        buffer.begin()
        assert buffer.held_bytes == 0
        buffer.append(b"z" * 20 * MIB)
        assert measured > before
        assert path.stat().st_blocks * 512 == buffer.held_bytes == 20 * MIB
        with SnapshotBufferReader(path) as reader:
            assert bytes(reader.view(20 * MIB - 4, 4)) == b"zzzz"


def test_a_buffer_without_memory_is_freed_without_an_error(path: Path) -> None:
    """A rank has created it and reserved nothing; another one is gone."""
    path.touch(0o600)
    free_memory(path)
    path.unlink()
    with pytest.raises(CheckpointError):
        free_memory(path)


def test_a_full_limit_is_detected_before_memory_is_taken(path: Path) -> None:
    """The error names the limit, and the buffer is unchanged."""
    headroom = Headroom(name="a small limit", free_bytes=(64 + 8) * MIB, total_bytes=200 * MIB)
    with SnapshotBuffer(path, measure=lambda folder: headroom) as buffer:
        offset = buffer.append(b"kept")
        with pytest.raises(
            NoHeadroomError, match=r"needs 20 MiB more, but a small limit has 72 MiB free, 8\.0 MiB of them"
        ):
            buffer.allocate(20 * MIB)
        assert buffer.held_bytes == GROWTH_BYTES
        assert path.stat().st_size == GROWTH_BYTES
        assert bytes(buffer.view(offset, 4)) == b"kept"
        assert buffer.allocate(1 * MIB) == 64


def test_a_failed_reservation_returns_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may fill the file system after the headroom was measured."""
    real = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if offset + size > 12 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(descriptor, offset + size)

    with SnapshotBuffer(path, measure=wide) as buffer:
        buffer.append(b"kept")
        monkeypatch.setattr(buffer_module, "RESERVATION_BYTES", 4 * MIB)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoHeadroomError, match="No space left on device"):
            buffer.allocate(30 * MIB)
        assert path.stat().st_size == buffer.held_bytes == GROWTH_BYTES
        monkeypatch.setattr(os, "posix_fallocate", real)
        assert bytes(buffer.view(0, 4)) == b"kept"


def test_a_disk_error_is_not_reported_as_missing_memory(
    buffer: SnapshotBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing directly would not help."""

    def broken(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        buffer.reserve(1)


def test_the_file_size_limit_is_reported_as_missing_memory(path: Path) -> None:
    """The kernel's signal SIGXFSZ does not kill the process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SnapshotBuffer(path, measure=wide) as buffer:
        buffer.append(b"kept")
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * MIB, hard))
        try:
            with pytest.raises(NoHeadroomError, match="File too large"):
                buffer.allocate(16 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert bytes(buffer.view(0, 4)) == b"kept"
        assert path.stat().st_size == buffer.held_bytes == GROWTH_BYTES


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """In a world-writable folder it could point to any file of this user."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        SnapshotBuffer(path)
    assert victim.read_bytes() == b"precious"


def test_a_file_of_another_user_is_not_used(
    buffer: SnapshotBuffer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could read the weights."""
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match="not a regular file of this user"):
        SnapshotBufferReader(path)


def test_a_reader_has_read_only_views(buffer: SnapshotBuffer, path: Path) -> None:
    """The file is mapped for reading."""
    buffer.append(b"data")
    with SnapshotBufferReader(path) as reader, reader.view(0, 4) as view:
        assert view.readonly


@pytest.mark.parametrize(
    ("offset", "size"), [(-64, 64), (0, GROWTH_BYTES + 1), (GROWTH_BYTES, 1), (0, -1), (1 << 62, 1 << 62)]
)
def test_a_record_outside_the_file_is_refused(
    buffer: SnapshotBuffer, path: Path, offset: int, size: int
) -> None:
    """The index may be damaged or the file truncated."""
    buffer.append(b"data")
    with SnapshotBufferReader(path) as reader, pytest.raises(CheckpointError, match="but a record has"):
        reader.view(offset, size)


def test_an_empty_buffer_cannot_be_read(buffer: SnapshotBuffer, path: Path) -> None:
    """The error says that it cannot be mapped."""
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        SnapshotBufferReader(path)


def test_a_missing_buffer_cannot_be_read(path: Path) -> None:
    """The error names the file."""
    with pytest.raises(CheckpointError, match=r"rank0\.buffer cannot be opened: No such file"):
        SnapshotBufferReader(path)
