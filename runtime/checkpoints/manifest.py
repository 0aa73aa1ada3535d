"""Which checkpoints are complete, whose they are, and whether their bytes are what was written.

A checkpoint is Hugging Face's directory plus `MANIFEST.json`, written last and by rename, once every other file is
on disk: digest and size of every file, step, world size and batch, the run and the `train()` call it belongs to,
versions, and a digest of the manifest itself. No manifest, no checkpoint. Called by the guard when it saves and when
it resumes, and by `grpo-run checkpoints`. Does not write weights, rotate, stage or move directories (`publishing.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic
from blake3 import blake3

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import write_json

MANIFEST = "MANIFEST.json"
LOCK = ".partial.lock"
"""Held by whoever still writes the directory; never part of a checkpoint."""
SCHEMA = 1
DIGEST_BYTES = 32 << 20
"""Read and digested at a time: enough for every thread of BLAKE3, and seldom more than a second on a slow disk."""
SYNC_BYTES = 64 << 20
"""Put on disk at a time, see `sync_tree`."""
NAME = re.compile(r"checkpoint-([0-9]+)")
"""Transformers' own name of a checkpoint's directory; `fullmatch` it."""


_LIBC = ctypes.CDLL(None, use_errno=True)


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


class Identity(pydantic.BaseModel):
    """Whose a checkpoint is and of what, in memory (`staging.Staged`) as on disk (`Manifest`).

    `scheduled` is false when we took it for recovery and the script's own schedule did not ask for it. `global_batch`
    is in samples an optimizer step, over all ranks. `layout` names how the state is cut over ranks (`ddp`,
    `deepspeed-zero3`, `fsdp2`), `model_shape` is `model_shape.model_shape`'s. Batch, layout and shape are None in
    manifests older than these fields.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
    run_id: str
    train_call: TrainCall
    step: int
    world_size: int
    scheduled: bool = True
    global_batch: int | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    layout: str | None = None
    model_shape: str | None = None
    versions: dict[str, str]

    @property
    def call_of_run(self) -> tuple[str, int]:
        """Which `train()` call of which run it belongs to: the run's id and the call's ordinal."""
        return self.run_id, self.train_call.ordinal

    @property
    def folder(self) -> str:
        """The checkpoint's directory name."""
        return f"checkpoint-{self.step}"


class Manifest(Identity):
    """The contents of `MANIFEST.json`.

    `finished` says that the call it belongs to ran to its end here. `seal` is the digest of the rest of the manifest,
    None in manifests older than the field.
    """

    schema_version: int = SCHEMA
    finished: bool = False
    files: dict[str, FileEntry]
    seal: str | None = None

    @property
    def size_bytes(self) -> int:
        """Of all files; the manifest itself is not counted."""
        return sum(entry.size for entry in self.files.values())


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A directory with a manifest that could be read."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A directory `checkpoint-N`. `problem` says why there is no manifest; `corrupt` that it is there and was changed."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None
    corrupt: bool = False


def digest(path: Path, progress: Callable[[int], None] = lambda count: None) -> FileEntry:
    """Size and BLAKE3 of one file.

    Args:
        progress: told how many more bytes are digested, a part of the file at a time.

    Raises:
        OSError: it cannot be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    size = 0
    buffer = memoryview(bytearray(min(DIGEST_BYTES, max(1, path.stat().st_size))))
    # read, not mapped: an error of the disk is an OSError then, and no SIGBUS
    with open(path, "rb", buffering=0) as reader:
        while count := reader.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
            progress(count)
    return FileEntry(size=size, blake3=hasher.hexdigest())


def write_manifest(
    path: Path, identity: Identity, *, progress: Callable[[int], None] = lambda count: None
) -> Manifest:
    """Put every file under `path` on disk, digest it, and publish the manifest. All ranks must have finished writing.

    Args:
        identity: what the checkpoint is; of a `Staged`, what is its own alone is left out.
        progress: told how many more bytes are digested, or put on disk.

    Raises:
        CheckpointError: there is nothing to publish.
        OSError: a file could not be put on disk; there is no manifest then.
    """
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and not _is_ours(file.name):
            files[str(file.relative_to(path))] = digest(file, progress)
    if not files:
        raise CheckpointError(f"{path} is empty: nothing to publish")
    sync_tree(path, progress)
    fields = identity.model_dump(include=set(Identity.model_fields))
    return _write(path, Manifest(files=files, **fields))


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, LOCK) or name.startswith(f".{MANIFEST}")


def _write(path: Path, manifest: Manifest) -> Manifest:
    # first in the file: what says how to read the rest
    fields = {"schema_version": manifest.schema_version} | manifest.model_dump()
    sealed = manifest.model_copy(update={"seal": _seal(fields)})
    write_json(path / MANIFEST, fields | {"seal": sealed.seal})
    sync_directory(path)
    return sealed


def _seal(fields: Mapping[str, Any]) -> str:
    """Over every field as it was written, also those that only a later release knows."""
    rest = {key: value for key, value in fields.items() if key != "seal"}
    return blake3(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync_tree(path: Path, progress: Callable[[int], None] = lambda count: None) -> None:
    """Put every file and directory under `path` on disk, leaves first.

    Args:
        progress: told how many more bytes are on disk, a part of a file at a time.

    Raises:
        OSError: the disk refused one of them.
    """
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # another rank's temporary file, gone by now
                _sync(Path(folder) / name, os.O_RDONLY, progress)
        sync_directory(Path(folder))


def sync_directory(path: Path) -> None:
    """Put a directory's names on disk; a file system that cannot do that for directories is left to its own ways."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def _sync(path: Path, flags: int, progress: Callable[[int], None] | None = None) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        if progress is not None:
            _write_back(descriptor, progress)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_back(descriptor: int, progress: Callable[[int], None]) -> None:
    """Write a file's pages back a part at a time: the `fsync` that follows says nothing until it is done.

    `sync_file_range(2)`; all three of its flags: wait for what is under way, write the rest, wait for that. It makes
    nothing durable by itself.
    """
    size = os.fstat(descriptor).st_size
    for offset in range(0, size, SYNC_BYTES):
        result = _LIBC.sync_file_range(
            descriptor, ctypes.c_int64(offset), ctypes.c_int64(SYNC_BYTES), ctypes.c_uint(7)
        )
        if result != 0:
            number = ctypes.get_errno()
            if number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP):
                return  # not on this file system, or not in this container: `fsync` does all of it
            raise OSError(number, os.strerror(number))
        progress(min(SYNC_BYTES, size - offset))


def mark_finished(path: Path) -> None:
    """Say in the manifest that the call it belongs to ran to its end."""
    _write(path, read_manifest(path).model_copy(update={"finished": True}))


def withdraw(path: Path) -> None:
    """Take a manifest away before its directory is written again."""
    (path / MANIFEST).unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory, unchanged since it was written.

    Raises:
        CheckpointError: there is none, it is not one of ours, or it does not match its own digest.
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
        raise _UnknownSchema(
            f"{path / MANIFEST} has schema {manifest.schema_version}, this release knows {SCHEMA}"
        )
    fields = json.loads(raw)
    # the seal came together with `scheduled`: a manifest with one of them alone was changed
    if ("seal" in fields) != ("scheduled" in fields) or (manifest.seal and _seal(fields) != manifest.seal):
        raise CheckpointError(f"{path / MANIFEST} does not match its digest")
    return manifest


class _UnknownSchema(CheckpointError):
    """Another release's manifest: nothing is known about it, so neither is that it is bad."""


def verify(path: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, sizes first.

    Raises:
        CheckpointError: names the first file that is missing or differs; caused by an OSError when the file could
            not be looked at.
    """
    verify_sizes(path, manifest)
    for name, entry in manifest.files.items():
        try:
            found = digest(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found.blake3 != entry.blake3:
            raise CheckpointError(f"{path / name} does not match its digest")


def verify_sizes(path: Path, manifest: Manifest) -> None:
    """Compare the sizes alone, which reads no file; raises as `verify`."""
    for name, entry in manifest.files.items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} is missing: {error.strerror}") from error
        if size != entry.size:
            raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry.size}")


def could_not_look(error: CheckpointError) -> bool:
    """The file could not be read, which says nothing about its bytes; a missing one is certain."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


def step_of(path: Path) -> int | None:
    """The step in a directory's name, None when it is not `checkpoint-N`."""
    match = NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def candidates(*directories: Path) -> Iterator[Candidate]:
    """Every directory `checkpoint-N` of `directories`, newest step first; at one step in the order of `directories`."""
    found = []
    for place, directory in enumerate(dict.fromkeys(directories)):
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # not made yet, or not to be had: it holds nothing that could be loaded
        for name in names:
            step = step_of(Path(name))
            if step is not None:
                found.append((-step, place, directory / name))
    for negative, _, path in sorted(found):
        if not path.is_dir():
            continue
        try:
            yield Candidate(path=path, step=-negative, manifest=read_manifest(path))
        except CheckpointError as error:
            corrupt = not isinstance(error, _UnknownSchema) and not isinstance(error.__cause__, OSError)
            yield Candidate(path=path, step=-negative, manifest=None, problem=str(error), corrupt=corrupt)


def find(*directories: Path) -> Iterator[FoundCheckpoint]:
    """Every checkpoint with a manifest in `directories`, newest step first; at one step the first directory's."""
    for candidate in candidates(*directories):
        if candidate.manifest is not None:
            yield FoundCheckpoint(path=candidate.path, manifest=candidate.manifest)


def versions() -> dict[str, str]:
    """The libraries whose formats a checkpoint depends on."""
    from importlib.metadata import version

    names = ("grpo-run", "torch", "transformers", "trl", "accelerate", "deepspeed")
    return {name: version(name) for name in names}


def manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    """Plain form, for commands that print it."""
    return manifest.model_dump()
