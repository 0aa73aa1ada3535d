"""Write the files of a snapshot from its buffer, byte for byte as torch and safetensors would.

Called by the drain worker after training has continued. Memory use is bounded: bytes go from the mapped
buffer to the file. Does not sync, digest or rename files, and does not check whether the buffer is still
valid.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath

from grpo_run.runtime.snapshots.buffer import SnapshotBufferReader
from grpo_run.runtime.snapshots.index import SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.upstream import process_names

PRIVATE_FOLDER = "grpo_run"
"""The checkpoint folder with the states of random generators and of the data; readable by its owner only."""
CHUNK_BYTES = 16 << 20
"""Bytes per write where the format allows it, so that progress is reported often."""


def write_files(
    index: SnapshotIndex,
    buffer: SnapshotBufferReader,
    destination: Path,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write every file of the index under `destination`, creating folders and replacing existing files.

    File modes follow the umask, except below `PRIVATE_FOLDER`: 0700 for the folder and 0600 for its files.

    Args:
        destination: the checkpoint directory. Torch stores a file's own name in the file, and a fixed name if
            the path is not ASCII, so the path must be the one the script would have used.
        progress: called with the number of bytes just written, from this thread.

    Returns:
        The written files, in order.

    Raises:
        CheckpointError: a record lies outside the buffer.
        OSError: a safetensors file cannot be written.
        RuntimeError: torch cannot write a file.
    """
    report = progress or (lambda size_bytes: None)
    written = []
    for file in index.files:
        path = destination / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        is_private = PurePath(file.path).parts[:-1][:1] == (PRIVATE_FOLDER,)
        if is_private:
            _set_mode(destination / PRIVATE_FOLDER, 0o700)
        if isinstance(file, TorchFile):
            _write_torch(file, buffer, path, report)
        else:
            _write_safetensors(file, buffer, path, report)
        if is_private:
            _set_mode(path, 0o600)
        written.append(path)
    return written


def _set_mode(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # some file systems have no modes
        path.chmod(mode)


def _write_torch(
    file: TorchFile, buffer: SnapshotBufferReader, path: Path, report: Callable[[int], None]
) -> None:
    with process_names.torch_archive(
        str(path), compute_crc32=file.compute_crc32, storage_alignment=file.storage_alignment
    ) as write_record:
        for record in file.records:
            write_record(record.name, buffer.address(record.offset, record.size), record.size)
            report(record.size)


def _write_safetensors(
    file: SafetensorsFile, buffer: SnapshotBufferReader, path: Path, report: Callable[[int], None]
) -> None:
    (record,) = file.records
    with buffer.view(record.offset, record.size) as view, open(path, "wb", buffering=0) as out:
        position = 0
        while position < record.size:
            # an unbuffered write may write less than requested
            count = out.write(view[position : position + CHUNK_BYTES])
            position += count
            report(count)
