"""The checkpoint manifest: what `MANIFEST.json` contains, and how it is written and read.

A published checkpoint is a directory in Hugging Face's layout plus `MANIFEST.json`. The manifest holds the
size and digest of every file, the step, the world size and the batch, the run and the `train()` call that
wrote it, library versions, and a digest of itself. It is written by rename after all other files are on disk,
so a directory without a manifest was not published by us. Called when a checkpoint is saved, resumed from or
listed. Does not write weights, stage, rename or delete directories (see `publishing.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic
from blake3 import blake3

from grpo_run.runtime.call_names import call_kind, call_title
from grpo_run.runtime.checkpoints.digests import FileEntry, digest_file
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import sync_tree, write_json

MANIFEST = "MANIFEST.json"
LOCK = ".partial.lock"
"""The lock file of a directory that is being written; never part of a checkpoint."""
SCHEMA = 1
FORMAT_LIBRARIES = ("grpo-run", "torch", "transformers", "trl", "accelerate", "deepspeed")
"""What defines a checkpoint's format."""


class TrainCall(pydantic.BaseModel):
    """Identify one `train()` call or one hand-written loop of a run.

    `ordinal` is its number in the run, also if the script skips others. `trainer_class` is
    `call_names.LOOP` for a loop.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    ordinal: int
    trainer_class: str
    output_dir: str

    @property
    def kind(self) -> str:
        """What it is, as messages name it."""
        return call_kind(self.trainer_class)

    @property
    def title(self) -> str:
        """The call as messages name it."""
        return call_title(self.ordinal, self.trainer_class)


class Identity(pydantic.BaseModel):
    """Which run, call, step and layout a checkpoint belongs to; the same in memory and on disk.

    Attributes:
        scheduled: True if the script's own save schedule asked for it, so that it is published as
            `checkpoint-N`; False for a snapshot.
        kept: the user asked for it (`grpo-run save`), and a run never removes it.
        global_batch: samples per optimizer step, over all ranks. None if not known, like the next four.
        per_device_train_batch_size: samples per rank and micro-batch.
        gradient_accumulation_steps: micro-batches per optimizer step.
        layout: how the state is distributed over ranks: `ddp`, `deepspeed-zero3`, `fsdp2`.
        model_shape: digest of the model's parameter names, shapes and types, see
            `compatibility.digest_model_shape`.
        versions: of those of `FORMAT_LIBRARIES` that are installed.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
    run_id: str
    train_call: TrainCall
    step: int
    world_size: int
    scheduled: bool = True
    kept: bool = False
    global_batch: int | None = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    layout: str | None = None
    model_shape: str | None = None
    versions: dict[str, str]

    @property
    def train_call_key(self) -> tuple[str, int]:
        """The run id and the ordinal of the `train()` call; equal for checkpoints of one call."""
        return self.run_id, self.train_call.ordinal

    @property
    def folder(self) -> str:
        """The name under which the trainer writes it."""
        return f"checkpoint-{self.step}"


class Manifest(Identity):
    """The contents of `MANIFEST.json`.

    Attributes:
        finished: the `train()` call ran to its end at this checkpoint.
        files: entries by path relative to the checkpoint directory.
        seal: digest of all other fields; None only until it is written.
    """

    schema_version: int = SCHEMA
    finished: bool = False
    files: dict[str, FileEntry]
    seal: str | None = None

    @property
    def size_bytes(self) -> int:
        """Total size of the files, without the manifest."""
        return sum(entry.size for entry in self.files.values())


class UnknownSchemaError(CheckpointError):
    """A manifest of another release. It cannot be used, but it is not corrupt."""


def write_manifest(
    path: Path, identity: Identity, *, progress: Callable[[int], None] = lambda size_bytes: None
) -> Manifest:
    """Digest and fsync every file under `path`, then write the manifest.

    All ranks must have finished writing.

    Args:
        identity: what the checkpoint is. Fields of a subclass are not copied.
        progress: called with the number of bytes just digested or written to disk.

    Raises:
        CheckpointError: the directory has no files.
        OSError: a file cannot be read or synced; no manifest is written.
    """
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and not _is_bookkeeping(file.name):
            files[str(file.relative_to(path))] = digest_file(file, progress)
    if not files:
        raise CheckpointError(f"{path} is empty: nothing to publish")
    sync_tree(path, progress)
    fields = identity.model_dump(include=set(Identity.model_fields))
    return _write_sealed(path, Manifest(files=files, **fields))


def _is_bookkeeping(name: str) -> bool:
    return name in (MANIFEST, LOCK) or name.startswith(f".{MANIFEST}")


def _write_sealed(path: Path, manifest: Manifest, fence: Path | None = None) -> Manifest:
    # the schema comes first in the file: it says how to read the rest
    fields = {"schema_version": manifest.schema_version} | manifest.model_dump()
    sealed = manifest.model_copy(update={"seal": compute_seal(fields)})
    write_json(path / MANIFEST, fields | {"seal": sealed.seal}, through=fence)
    return sealed


def compute_seal(fields: Mapping[str, Any]) -> str:
    """Return the digest of all manifest fields but the seal, including fields of later releases."""
    rest = {key: value for key, value in fields.items() if key != "seal"}
    return blake3(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def mark_finished(path: Path, finished: bool = True, *, fence: Path | None = None) -> None:
    """Record in the manifest whether the `train()` call ended here. Raises as `read_manifest`.

    Args:
        fence: of the attempt (`fencing.py`); None on one host.
    """
    _write_sealed(path, read_manifest(path).model_copy(update={"finished": finished}), fence)


def mark_kept(path: Path, *, fence: Path | None = None) -> None:
    """Record in the manifest that the user asked for this checkpoint. Arguments as in `mark_finished`."""
    _write_sealed(path, read_manifest(path).model_copy(update={"kept": True}), fence)


def remove_manifest(path: Path) -> None:
    """Remove the manifest, before the directory is overwritten or deleted."""
    (path / MANIFEST).unlink(missing_ok=True)


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint directory and check its seal.

    Raises:
        CheckpointError: the manifest is missing, invalid, of another schema (`UnknownSchemaError`), or was
            changed.
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
        raise UnknownSchemaError(
            f"{path / MANIFEST} has schema {manifest.schema_version}, this release knows {SCHEMA}"
        )
    fields = json.loads(raw)
    if compute_seal(fields) != manifest.seal:
        raise CheckpointError(f"{path / MANIFEST} does not match its digest")
    return manifest
