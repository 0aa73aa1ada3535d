"""Files written from a snapshot buffer: paths, modes and errors. Their content: `unit/runtime/rank/saving/packing`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots import writer
from grpo_run.runtime.snapshots.buffer import SnapshotBuffer, SnapshotBufferReader
from grpo_run.runtime.snapshots.index import BufferRecord, SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.snapshots.writer import write_files

CONTENT = b"0123456789" * 100


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SnapshotBufferReader]:
    """A buffer that holds CONTENT at offset 0."""
    with SnapshotBuffer(tmp_path / "buffer") as buffer:
        buffer.append(CONTENT)
    with SnapshotBufferReader(tmp_path / "buffer") as opened:
        yield opened


def weights(path: str, size: int = len(CONTENT)) -> SnapshotIndex:
    """An index of one file that consists of the buffer's bytes."""
    return SnapshotIndex(
        files=[SafetensorsFile(path=path, records=(BufferRecord(name="file", offset=0, size=size),))]
    )


def archive(path: str, size: int = len(CONTENT)) -> SnapshotIndex:
    """An index of one torch archive with one record."""
    record = BufferRecord(name="data/0", offset=0, size=size)
    return SnapshotIndex(
        files=[TorchFile(path=path, records=(record,), compute_crc32=True, storage_alignment=64)]
    )


def test_folders_are_created_and_files_replaced(reader: SnapshotBufferReader, tmp_path: Path) -> None:
    """A longer existing file is truncated."""
    old = tmp_path / "out/sub/model.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 5000)
    assert write_files(weights("sub/model.safetensors"), reader, tmp_path / "out") == [old]
    assert old.read_bytes() == CONTENT
    (new,) = write_files(archive("a/b/optimizer.pt"), reader, tmp_path / "out")
    assert new == tmp_path / "out/a/b/optimizer.pt"
    assert torch._C.PyTorchFileReader(str(new)).get_record("data/0") == CONTENT


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
@pytest.mark.parametrize("index", [weights("model.safetensors"), archive("optimizer.pt")])
def test_file_modes_follow_the_umask(
    reader: SnapshotBufferReader, tmp_path: Path, index: SnapshotIndex, umask: int, mode: int
) -> None:
    """torch and safetensors follow it too."""
    before = os.umask(umask)
    try:
        (path,) = write_files(index, reader, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("make", [weights, archive])
def test_the_private_folder_is_readable_by_its_owner_only(
    reader: SnapshotBufferReader, tmp_path: Path, make: Callable[[str], SnapshotIndex]
) -> None:
    """It contains random states and data positions."""
    (path,) = write_files(make("grpo_run/rank0.pt"), reader, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_progress_adds_up_to_the_size(
    reader: SnapshotBufferReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported in parts where the format allows it."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 300)
    seen: list[int] = []
    write_files(weights("model.safetensors"), reader, tmp_path, seen.append)
    assert seen == [300, 300, 300, 100]
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    seen.clear()
    write_files(archive("optimizer.pt"), reader, tmp_path, seen.append)
    assert seen == [1000]


@pytest.mark.parametrize("make", [weights, archive])
def test_a_record_outside_the_buffer_is_refused(
    reader: SnapshotBufferReader, tmp_path: Path, make: object
) -> None:
    """Memory outside the mapping is never read."""
    assert callable(make)
    with pytest.raises(CheckpointError, match="but a record has"):
        write_files(make("file", size=1 << 40), reader, tmp_path)


def test_a_folder_in_place_of_a_file_raises_oserror(reader: SnapshotBufferReader, tmp_path: Path) -> None:
    """The error comes from the system."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_files(weights("model.safetensors"), reader, tmp_path)


def test_a_full_disk_raises_an_error(reader: SnapshotBufferReader) -> None:
    """OSError from safetensors files, RuntimeError from torch files."""
    seen: list[int] = []
    with pytest.raises(OSError, match="No space left"):
        write_files(weights("full"), reader, Path("/dev"), seen.append)
    with pytest.raises(RuntimeError):
        write_files(archive("full"), reader, Path("/dev"), seen.append)
