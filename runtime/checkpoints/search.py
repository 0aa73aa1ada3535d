"""Find the checkpoints in one or more directories, newest step first.

Called by the ranks when they save and resume, and by `grpo-run checkpoints`. Reads directory names and
manifests only; does not check whether the files are complete or verified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import Manifest, UnknownSchemaError, read_manifest
from grpo_run.runtime.errors import CheckpointError

CHECKPOINT_NAME = re.compile(r"checkpoint-([0-9]+)")
"""Transformers' name for a checkpoint directory; match with `fullmatch`."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint directory with a valid manifest."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A directory named `checkpoint-N`, with or without a manifest.

    Attributes:
        problem: why `manifest` is None.
        corrupt: the manifest exists and was changed or is invalid.
    """

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None = None
    corrupt: bool = False


def step_of(path: Path) -> int | None:
    """Return the step in a directory name, or None if it is not `checkpoint-N`."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def find_candidates(*directories: Path) -> Iterator[Candidate]:
    """Yield every `checkpoint-N` of `directories`, newest step first.

    Equal steps are yielded in the order of `directories`. Directories that cannot be listed are skipped.
    """
    found = []
    for position, directory in enumerate(dict.fromkeys(directories)):
        try:
            names = os.listdir(directory)
        except OSError:
            continue  # not created yet or not readable: nothing can be loaded from it
        for name in names:
            step = step_of(Path(name))
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
