"""Where checkpoints and snapshots lie, and find them in one or more directories, newest step first.

    output_dir/checkpoint-40                                 saved by the script's own schedule
    output_dir/_grpo_run/<run-id>/call-1/snapshot-43         taken for recovery, at a stop, or for `grpo-run
    save`
    output_dir_grpo_run/<run-id>/call-1/snapshot-15          the same while `output_dir` is empty: scripts may
    refuse one that is not

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
"""The folder of snapshots in an output directory. The name of one beside it ends so."""
CALL_NAME = re.compile(r"call-[0-9]+")
MAX_NAME_BYTES = 255
"""NAME_MAX of Linux."""


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


def lies_beside(output_dir: Path) -> bool:
    """Whether the next snapshot is written beside an output directory, which has nothing in it yet.

    Not beside one that is on a disk of its own, such as the volume of a container.
    """
    try:
        with os.scandir(output_dir) as entries:
            if any(entries):
                return False
    except FileNotFoundError:
        pass  # the script has not created it
    except OSError:
        return False  # it cannot be written into, which saving says
    _, beside = _folders(output_dir)
    fits = len(os.fsencode(beside.name)) <= MAX_NAME_BYTES
    return fits and os.access(beside.parent, os.W_OK) and not os.path.ismount(os.path.realpath(output_dir))


def snapshot_places(output_dir: Path, run_id: str, train_call: int) -> tuple[Path, Path]:
    """Return where the snapshots of one `train()` call of a run may lie: in the output directory, and beside
    it.
    """
    inside, beside = run_folders(output_dir, run_id)
    own = f"call-{train_call}"
    return inside / own, beside / own


def run_folders(output_dir: Path, run_id: str) -> tuple[Path, Path]:
    """Return the folders of a run in the output directory, and beside it; they need not exist."""
    inside, beside = _folders(output_dir)
    return inside / run_id, beside / run_id


def snapshot_directories(output_dir: Path, run_id: str = "*") -> list[Path]:
    """Return the existing directories of snapshots of a run, or of all runs."""
    return [
        folder / run / name
        for folder in _folders(output_dir)
        for run in ([run_id] if run_id != "*" else _names(folder))
        for name in _names(folder / run)
        if CALL_NAME.fullmatch(name)
    ]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # there is none, it cannot be read, or its name would be too long


def _folders(output_dir: Path) -> tuple[Path, Path]:
    place = Path(os.path.realpath(output_dir))
    return output_dir / SNAPSHOTS, place.parent / f"{place.name}{SNAPSHOTS}"


def directories_of_run(run_id: str, *output_dirs: Path) -> list[Path]:
    """Return output directories, each with the directories of a run's snapshots in it."""
    return [
        directory
        for output_dir in output_dirs
        for directory in (output_dir, *snapshot_directories(output_dir, run_id))
    ]


def directory_of(identity: Identity, output_dir: Path) -> Path:
    """Return the directory in which a checkpoint is published now."""
    if identity.scheduled:
        return output_dir
    inside, beside = snapshot_places(output_dir, *identity.train_call_key)
    return beside if lies_beside(output_dir) else inside


def output_directory_of(path: Path) -> Path:
    """Return the output directory that a checkpoint or snapshot belongs to."""
    if not holds_snapshots(path.parent):
        return path.parent
    folder = path.parents[2]
    return folder.parent / folder.name.removesuffix(SNAPSHOTS)


def place_within(path: Path) -> Path:
    """Return where a checkpoint or snapshot lies in its output directory, or would if it is beside it."""
    return Path(SNAPSHOTS, *path.parts[-3:]) if holds_snapshots(path.parent) else Path(path.name)


def name_of(directory: Path, step: int) -> str:
    """Return the name of a checkpoint of this step in a directory."""
    return f"{'snapshot' if holds_snapshots(directory) else 'checkpoint'}-{step}"


def step_of(path: Path) -> int | None:
    """Return the step in a directory's name; None if it is neither a checkpoint nor, in its folder, a
    snapshot.
    """
    pattern = SNAPSHOT_NAME if holds_snapshots(path.parent) else CHECKPOINT_NAME
    match = pattern.fullmatch(path.name)
    return int(match[1]) if match else None


def holds_snapshots(directory: Path) -> bool:
    """Whether it is the directory of the snapshots of one `train()` call, by its name."""
    return (
        directory.parent.parent.name.endswith(SNAPSHOTS) and CALL_NAME.fullmatch(directory.name) is not None
    )


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
