"""Where checkpoints and snapshots lie, and find them in one or more directories, newest step first.

    output_dir/checkpoint-40                                 saved by the script's own schedule
    output_dir/_grpo_run/<run-id>/call-1/snapshot-43         taken for recovery, at a stop, or for `grpo-run
    save`

Transformers looks for `checkpoint-*` to rotate checkpoints, to keep the best one and to resume, and uploads
everything that does not begin with `_` to the hub. It must find there only what an undisturbed run would have
saved.

Called by the ranks when they save and resume, and by `grpo-run checkpoints`. Reads directory names and
manifests only; does not check whether the files are complete or verified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import Identity, Manifest, UnknownSchemaError, read_manifest
from grpo_run.runtime.errors import CheckpointError

CHECKPOINT_NAME = re.compile(r"checkpoint-([0-9]+)")
"""Transformers' name for a checkpoint directory; match with `fullmatch`."""
SNAPSHOT_NAME = re.compile(r"snapshot-([0-9]+)")
SNAPSHOTS = "_grpo_run"
"""The folder of snapshots in an output directory."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint directory with a valid manifest."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A directory with the name of a checkpoint, with or without a manifest.

    Attributes:
        problem: why `manifest` is None.
        corrupt: the manifest exists and was changed or is invalid.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None
    corrupt: bool = False


def snapshot_directory(output_dir: Path, run_id: str, train_call: int) -> Path:
    """Return where the snapshots of one `train()` call of a run lie."""
    return output_dir / SNAPSHOTS / run_id / f"call-{train_call}"


def snapshot_directories(output_dir: Path, run_id: str = "*") -> list[Path]:
    """Return the existing directories of snapshots of a run, or of all runs."""
    if run_id != "*":
        return sorted((output_dir / SNAPSHOTS / run_id).glob("call-*"))
    return sorted(output_dir.glob(f"{SNAPSHOTS}/*/call-*"))


def directories_of_run(run_id: str, *output_dirs: Path) -> list[Path]:
    """Return output directories, each with the directories of a run's snapshots in it."""
    return [
        directory
        for output_dir in output_dirs
        for directory in (output_dir, *snapshot_directories(output_dir, run_id))
    ]


def directory_of(identity: Identity, output_dir: Path) -> Path:
    """Return the directory in which a checkpoint is published."""
    if identity.scheduled:
        return output_dir
    return snapshot_directory(output_dir, identity.run_id, identity.train_call.ordinal)


def output_directory_of(path: Path) -> Path:
    """Return the output directory that a checkpoint or snapshot belongs to."""
    return path.parents[3] if _holds_snapshots(path.parent) else path.parent


def name_of(directory: Path, step: int) -> str:
    """Return the name of a checkpoint of this step in a directory."""
    return f"{'snapshot' if _holds_snapshots(directory) else 'checkpoint'}-{step}"


def step_of(path: Path) -> int | None:
    """Return the step in a directory's name; None if it is neither a checkpoint nor, in its folder, a
    snapshot.
    """
    pattern = SNAPSHOT_NAME if _holds_snapshots(path.parent) else CHECKPOINT_NAME
    match = pattern.fullmatch(path.name)
    return int(match[1]) if match else None


def _holds_snapshots(directory: Path) -> bool:
    return directory.parent.parent.name == SNAPSHOTS


def find_candidates(*directories: Path) -> Iterator[Candidate]:
    """Yield every checkpoint of `directories`, newest step first.

    Equal steps are yielded in the order of `directories`. Directories that cannot be listed are skipped.
    """
    found = []
    for position, directory in enumerate(dict.fromkeys(directories)):
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # not created yet or not readable: nothing can be loaded from it
        for name in names:
            step = step_of(directory / name)
            if step is not None:
                found.append((-step, position, directory / name))
    for negative_step, _, path in sorted(found):
        if path.is_dir():
            yield read_candidate(path, -negative_step)


def read_candidate(path: Path, step: int) -> Candidate:
    """Return the candidate for a directory whose name contains `step`."""
    try:
        return Candidate(path=path, step=step, manifest=read_manifest(path))
    except CheckpointError as error:
        corrupt = not isinstance(error, UnknownSchemaError) and not isinstance(error.__cause__, OSError)
        return Candidate(path=path, step=step, manifest=None, problem=str(error), corrupt=corrupt)


def find_checkpoints(*directories: Path) -> Iterator[FoundCheckpoint]:
    """Yield every checkpoint with a valid manifest, in the order of `find_candidates`."""
    for candidate in find_candidates(*directories):
        if candidate.manifest is not None:
            yield FoundCheckpoint(path=candidate.path, manifest=candidate.manifest)
