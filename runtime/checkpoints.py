"""Which checkpoints are complete, whose they are, and whether their bytes are what was written.

A checkpoint is Hugging Face's directory plus `MANIFEST.json`, written last and by rename: digest and size of
every file, step, world size, the run and the `train()` call it belongs to, versions. No manifest, no
checkpoint. Called by the guard when it saves and when it resumes. Does not write weights, rotate or stage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from blake3 import blake3

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rundir import write_json

MANIFEST = "MANIFEST.json"
SCHEMA = 1


class FileEntry(pydantic.BaseModel):
    """One file of a checkpoint: its size and BLAKE3 digest in hexadecimal."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    size: int
    blake3: str


class TrainCall(pydantic.BaseModel):
    """A `train()` call of a script, known by what does not change when the script runs again."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    ordinal: int
    trainer_class: str
    output_dir: str


class Manifest(pydantic.BaseModel):
    """The contents of `MANIFEST.json`. `finished` says that the call it belongs to ran to its end here."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    schema_version: int = SCHEMA
    run_id: str
    train_call: TrainCall
    step: int
    world_size: int
    finished: bool = False
    versions: dict[str, str]
    files: dict[str, FileEntry]


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A directory with a manifest that could be read."""

    path: Path
    manifest: Manifest


def digest(path: Path) -> FileEntry:
    """Size and BLAKE3 of one file, read through a memory map."""
    hasher = blake3(max_threads=blake3.AUTO)
    size = path.stat().st_size
    if size:
        hasher.update_mmap(path)
    return FileEntry(size=size, blake3=hasher.hexdigest())


def write_manifest(
    path: Path, *, run_id: str, train_call: TrainCall, step: int, world_size: int, versions: dict[str, str]
) -> Manifest:
    """Digest every file under `path` and publish the manifest. All ranks must have finished writing.

    Raises:
        CheckpointError: there is nothing to publish.
    """
    files = {
        str(file.relative_to(path)): digest(file)
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST and not file.name.startswith(f".{MANIFEST}")
    }
    if not files:
        raise CheckpointError(f"{path} is empty: nothing to publish")
    manifest = Manifest(
        run_id=run_id, train_call=train_call, step=step, world_size=world_size, versions=versions, files=files
    )
    write_json(path / MANIFEST, manifest.model_dump())
    return manifest


def mark_finished(path: Path) -> None:
    """Say in the manifest that the call it belongs to ran to its end."""
    manifest = read_manifest(path)
    write_json(path / MANIFEST, manifest.model_copy(update={"finished": True}).model_dump())


def withdraw(path: Path) -> None:
    """Take a manifest away before its directory is written again."""
    (path / MANIFEST).unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: there is none, or it is not one of ours.
    """
    try:
        raw = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} has no readable {MANIFEST}: {error.strerror}") from error
    try:
        manifest = Manifest.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path / MANIFEST} is not a manifest: {error.errors()[0]['msg']}") from error
    if manifest.schema_version != SCHEMA:
        raise CheckpointError(
            f"{path / MANIFEST} has schema {manifest.schema_version}, this release knows {SCHEMA}"
        )
    return manifest


def verify(path: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, sizes first.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} is missing: {error.strerror}") from error
        if size != entry.size:
            raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry.size}")
    for name, entry in manifest.files.items():
        try:
            found = digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found.blake3 != entry.blake3:
            raise CheckpointError(f"{path / name} does not match its digest")


def find(output_dir: Path) -> Iterator[FoundCheckpoint]:
    """Every directory `checkpoint-N` of `output_dir` with a manifest, newest step first."""
    steps = []
    try:
        names = os.listdir(output_dir)
    except OSError:
        return
    for name in names:
        prefix, _, number = name.rpartition("-")
        if prefix == "checkpoint" and number.isdecimal():
            steps.append((int(number), output_dir / name))
    for _, path in sorted(steps, reverse=True):
        try:
            yield FoundCheckpoint(path=path, manifest=read_manifest(path))
        except CheckpointError:
            continue  # incomplete: not a checkpoint


def versions() -> dict[str, str]:
    """The libraries whose formats a checkpoint depends on."""
    from importlib.metadata import version

    names = ("grpo-run", "torch", "transformers", "trl", "accelerate", "deepspeed")
    return {name: version(name) for name in names}


def manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    """Plain form, for commands that print it."""
    return manifest.model_dump()
