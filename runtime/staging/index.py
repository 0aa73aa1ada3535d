"""The index of what one rank put into its arena: which files it makes, and where their bytes are.

Built by `grpo_run.trainers.capture.interception` in the rank, kept as JSON, read by `writer.py` in the process that
writes the files. Does not hold the bytes, nor know whether they are still there.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import pydantic

from grpo_run.runtime.errors import CheckpointError


class Record(pydantic.BaseModel):
    """A run of bytes in the arena; `name` is the record's name in its file, or says what it is."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    name: str
    offset: Annotated[int, pydantic.Field(ge=0)]
    size: Annotated[int, pydantic.Field(ge=0)]


def _below(path: str) -> str:
    """The path, when it stays below wherever it is put.

    Raises:
        ValueError: it is absolute, empty, or leads up.
    """
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} does not stay below the checkpoint's directory")
    return path


RelativePath = Annotated[str, pydantic.AfterValidator(_below)]


class TorchFile(pydantic.BaseModel):
    """What `torch.save` would have written: the records of its archive in the order of their writing.

    `compute_crc32` and `storage_alignment` are torch's settings at the time of the save
    (`torch.utils.serialization.config.save`).
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    kind: Literal["torch"] = "torch"
    path: RelativePath
    records: tuple[Record, ...]
    compute_crc32: bool
    storage_alignment: int


class SafetensorsFile(pydantic.BaseModel):
    """What `safetensors.torch.save_file` would have written: the file's bytes themselves, as one record."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    kind: Literal["safetensors"] = "safetensors"
    path: RelativePath
    records: tuple[Record]


File = Annotated[TorchFile | SafetensorsFile, pydantic.Field(discriminator="kind")]


class Image(pydantic.BaseModel):
    """The files of one rank's part of a checkpoint. A path is there once: what was saved last."""

    model_config = pydantic.ConfigDict(extra="forbid")
    schema_version: Literal[1] = 1
    files: list[File] = []

    @pydantic.model_validator(mode="after")
    def _paths_once(self) -> Image:
        paths = self.paths
        if len(set(paths)) != len(paths):
            raise ValueError("a path is there more than once")
        return self

    @property
    def paths(self) -> list[str]:
        """The files' paths, relative to the checkpoint's root."""
        return [file.path for file in self.files]

    @property
    def size_bytes(self) -> int:
        """All records together; the files are larger by their archives' bookkeeping."""
        return sum(record.size for file in self.files for record in file.records)

    def put(self, file: TorchFile | SafetensorsFile) -> None:
        """Add a file, in the place of an earlier one of its path."""
        self.drop(file.path)
        self.files.append(file)

    def drop(self, path: str) -> None:
        """Forget a file, if it is there: something else has been saved under its path."""
        self.files = [file for file in self.files if file.path != path]

    def to_json(self) -> bytes:
        """The image as JSON."""
        return self.model_dump_json().encode()


def read_image(path: Path) -> Image:
    """The image that a file holds.

    Raises:
        CheckpointError: it cannot be read, or is not an image of this release.
    """
    try:
        return parse_image(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def parse_image(content: bytes) -> Image:
    """The image in `content`.

    Raises:
        CheckpointError: it is not an image of this release.
    """
    try:
        return Image.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"not an image of a checkpoint: {error.errors()[0]['msg']}") from error
