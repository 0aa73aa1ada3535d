"""Writes the files of an image from its arena, byte for byte as torch and safetensors would have written them.

Called by the process that makes staged checkpoints durable, after the rank has gone on. Memory is bounded: bytes go
from the arena's mapping to the file. Does not sync, digest, rename or decide whether the arena is still valid.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath

from grpo_run.runtime import upstream
from grpo_run.runtime.staging.buffer import ArenaReader
from grpo_run.runtime.staging.index import Image, SafetensorsFile, TorchFile

PRIVATE = "grpo_run"
"""The folder of a checkpoint that only its owner may read: states of random generators and of the data, for us alone."""
CHUNK_BYTES = 16 << 20
"""Written at a time where the format allows it, so that progress is reported often."""


def write_files(
    image: Image,
    arena: ArenaReader,
    destination: Path,
    progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write every file of `image` under `destination`, making folders; files that are there are replaced.

    Modes are what the umask leaves, but 0600 below `PRIVATE`, and 0700 for that folder.

    Args:
        destination: where the files are to lie. Torch puts a file's own name into it, and another name when the
            path is not ASCII: give the path as the script would have.
        progress: called with the number of bytes just written, from this thread.

    Returns:
        The files, in the order of their writing.

    Raises:
        CheckpointError: a record lies outside of the arena.
        OSError: safetensors could not be written.
        RuntimeError: torch could not write, as torch says it.
    """
    report = progress or (lambda size_bytes: None)
    written = []
    for file in image.files:
        path = destination / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        private = PurePath(file.path).parts[:-1][:1] == (PRIVATE,)
        if private:
            _set_mode(destination / PRIVATE, 0o700)
        if isinstance(file, TorchFile):
            _write_torch(file, arena, path, report)
        else:
            _write_safetensors(file, arena, path, report)
        if private:
            _set_mode(path, 0o600)
        written.append(path)
    return written


def _set_mode(path: Path, mode: int) -> None:
    with suppress(PermissionError):  # a file system that has no modes
        path.chmod(mode)


def _write_torch(file: TorchFile, arena: ArenaReader, path: Path, report: Callable[[int], None]) -> None:
    with upstream.torch_archive(
        str(path), compute_crc32=file.compute_crc32, storage_alignment=file.storage_alignment
    ) as write_record:
        for record in file.records:
            write_record(record.name, arena.address(record.offset, record.size), record.size)
            report(record.size)


def _write_safetensors(
    file: SafetensorsFile, arena: ArenaReader, path: Path, report: Callable[[int], None]
) -> None:
    (record,) = file.records
    with arena.view(record.offset, record.size) as view, open(path, "wb", buffering=0) as out:
        position = 0
        while position < record.size:
            # a write may take less than it was given
            count = out.write(view[position : position + CHUNK_BYTES])
            position += count
            report(count)
