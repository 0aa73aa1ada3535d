"""Files from an arena: where they go, with which rights, and what is refused. What is in them: `test_packing.py`."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging import writer
from grpo_run.runtime.staging.buffer import SnapshotBuffer, SnapshotBufferReader
from grpo_run.runtime.staging.index import Record, SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.staging.writer import write_files

CONTENT = b"0123456789" * 100


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SnapshotBufferReader]:
    """An arena that holds CONTENT at 0."""
    with SnapshotBuffer(tmp_path / "arena") as arena:
        arena.append(CONTENT)
    with SnapshotBufferReader(tmp_path / "arena") as reading:
        yield reading


def weights(path: str, size: int = len(CONTENT)) -> SnapshotIndex:
    """An image of one file whose bytes are the arena's."""
    return SnapshotIndex(
        files=[SafetensorsFile(path=path, records=(Record(name="file", offset=0, size=size),))]
    )


def archive(path: str, size: int = len(CONTENT)) -> SnapshotIndex:
    """An image of one archive of one record."""
    record = Record(name="data/0", offset=0, size=size)
    return SnapshotIndex(
        files=[TorchFile(path=path, records=(record,), compute_crc32=True, storage_alignment=64)]
    )


def test_folders_are_made_and_files_replaced(reader: SnapshotBufferReader, tmp_path: Path) -> None:
    """Also one that is longer than what comes."""
    old = tmp_path / "out/sub/model.safetensors"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x" * 5000)
    assert write_files(weights("sub/model.safetensors"), reader, tmp_path / "out") == [old]
    assert old.read_bytes() == CONTENT
    (new,) = write_files(archive("a/b/optimizer.pt"), reader, tmp_path / "out")
    assert new == tmp_path / "out/a/b/optimizer.pt"
    assert torch._C.PyTorchFileReader(str(new)).get_record("data/0") == CONTENT


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
@pytest.mark.parametrize("image", [weights("model.safetensors"), archive("optimizer.pt")])
def test_rights_are_what_the_umask_leaves(
    reader: SnapshotBufferReader, tmp_path: Path, image: SnapshotIndex, umask: int, mode: int
) -> None:
    """As the libraries do."""
    before = os.umask(umask)
    try:
        (path,) = write_files(image, reader, tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("make", [weights, archive])
def test_our_own_folder_is_for_its_owner_alone(
    reader: SnapshotBufferReader, tmp_path: Path, make: Callable[[str], SnapshotIndex]
) -> None:
    """It holds states of random generators and of the data."""
    (path,) = write_files(make("grpo_run/rank0.pt"), reader, tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_progress_adds_up(
    reader: SnapshotBufferReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts where the format allows it."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 300)
    seen: list[int] = []
    write_files(weights("model.safetensors"), reader, tmp_path, seen.append)
    assert seen == [300, 300, 300, 100]
    assert (tmp_path / "model.safetensors").read_bytes() == CONTENT
    seen.clear()
    write_files(archive("optimizer.pt"), reader, tmp_path, seen.append)
    assert seen == [1000]


@pytest.mark.parametrize("make", [weights, archive])
def test_a_record_outside_of_the_arena_is_refused(
    reader: SnapshotBufferReader, tmp_path: Path, make: object
) -> None:
    """Instead of reading memory that is not there."""
    assert callable(make)
    with pytest.raises(CheckpointError, match="but a record has"):
        write_files(make("file", size=1 << 40), reader, tmp_path)


def test_a_destination_that_is_a_folder_is_an_error(reader: SnapshotBufferReader, tmp_path: Path) -> None:
    """It is the system's, with the path."""
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        write_files(weights("model.safetensors"), reader, tmp_path)


def test_a_full_disk_is_an_error(reader: SnapshotBufferReader) -> None:
    """From either writer; nothing is reported as written."""
    seen: list[int] = []
    with pytest.raises(OSError, match="No space left"):
        write_files(weights("full"), reader, Path("/dev"), seen.append)
    with pytest.raises(RuntimeError):
        write_files(archive("full"), reader, Path("/dev"), seen.append)
