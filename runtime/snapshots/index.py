"""The snapshot index: which checkpoint files one rank's snapshot buffer contains, and where.

Built in the rank by `runtime.rank.saving.interception`, stored as JSON, and read by the drain worker, which
writes the files (`writer.py`). Does not hold the bytes or know whether they are still valid.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import pydantic

from grpo_run.runtime.errors import CheckpointError


class BufferRecord(pydantic.BaseModel):
    """A range of bytes in the buffer. `name` is the name of the record in its file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    name: str
    offset: Annotated[int, pydantic.Field(ge=0)]
    size: Annotated[int, pydantic.Field(ge=0)]


def _require_relative(path: str) -> str:
    """Return the path if it stays below the directory it is joined to.

    Raises:
        ValueError: the path is absolute, empty, or contains `..`.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path below the checkpoint directory")
    return path


RelativePath = Annotated[str, pydantic.AfterValidator(_require_relative)]


class TorchFile(pydantic.BaseModel):
    """A file of `torch.save`: the records of its archive in the order they are written.

    `compute_crc32` and `storage_alignment` are torch's settings when the file was saved
    (`torch.utils.serialization.config.save`).
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    kind: Literal["torch"] = "torch"
    path: RelativePath
    records: tuple[BufferRecord, ...]
    compute_crc32: bool
    storage_alignment: int


class SafetensorsFile(pydantic.BaseModel):
    """A file of `safetensors.torch.save_file`: one record with all bytes of the file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    kind: Literal["safetensors"] = "safetensors"
    path: RelativePath
    records: tuple[BufferRecord]


File = Annotated[TorchFile | SafetensorsFile, pydantic.Field(discriminator="kind")]


class SnapshotIndex(pydantic.BaseModel):
    """The files that one rank contributes to a checkpoint. Each path occurs once, with its last save."""

    model_config = pydantic.ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    files: list[File] = []

    @pydantic.model_validator(mode="after")
    def _check_unique_paths(self) -> SnapshotIndex:
        paths = self.paths
        if len(set(paths)) != len(paths):
            raise ValueError("a path occurs more than once")
        return self

    @property
    def paths(self) -> list[str]:
        """Paths of the files, relative to the checkpoint directory."""
        return [file.path for file in self.files]

    @property
    def size_bytes(self) -> int:
        """Total size of the records. The files are larger by their archives' headers."""
        return sum(record.size for file in self.files for record in file.records)

    def put(self, file: TorchFile | SafetensorsFile) -> None:
        """Add a file, replacing an earlier one with the same path."""
        self.drop(file.path)
        self.files.append(file)

    def drop(self, path: str) -> None:
        """Remove the file with this path, if it exists: something else was saved there."""
        self.files = [file for file in self.files if file.path != path]

    def to_json(self) -> bytes:
        """Return the index as JSON."""
        return self.model_dump_json().encode()


def read_index(path: Path) -> SnapshotIndex:
    """Read an index file.

    Raises:
        CheckpointError: the file cannot be read, or is not a valid index.
    """
    try:
        return parse_index(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_index(content: bytes) -> SnapshotIndex:
    """Parse an index from JSON.

    Raises:
        CheckpointError: the content is not a valid index.
    """
    try:
        return SnapshotIndex.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"not a snapshot index: {error.errors()[0]['msg']}") from error
