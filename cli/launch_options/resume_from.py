"""Early checks of `--resume-from`, before ranks start.

A name that cannot be a run or a checkpoint is refused (called by `parse.py`), and so is an older checkpoint of the run
itself (called by `cli/launch.py`). The ranks check the checkpoint: its digests, and whether it fits the model and the batch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.search import (
    SNAPSHOTS,
    directories_of_run,
    find_checkpoints,
    output_directory_of,
)
from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.snapshots.ownership import recorded_areas
from grpo_run.runtime.snapshots.slot import STAGED


class _Saved(NamedTuple):
    """What a run has saved, ordered by its place in the run."""

    train_call: int
    step: int
    place: str


def check_resume_from(value: str | None, run_directory: Path, script_arguments: Sequence[str]) -> None:
    """Refuse a value that names neither a checkpoint nor a known run.

    A run is known by its directory under `runs/` or beside this run's directory, or by a checkpoint with its
    id in a directory that the script's arguments name, or up to two levels below the working directory.

    Raises:
        UsageError: the value is none of these; the message names the closest run.
    """
    if value is None:
        return
    path = Path(value)
    if path.is_dir():
        if not any((path / name).is_file() for name in (MANIFEST, TRAINER_STATE)):
            raise UsageError(f"--resume-from {value}: not a checkpoint directory (no {TRAINER_STATE} in it)")
        return
    roots = (DEFAULT_ROOT, run_directory.parent)
    if any((root / value / "run.json").is_file() for root in roots):
        return
    if any(
        found.manifest.run_id == value
        for folder in _output_directories(script_arguments)
        for found in find_checkpoints(*directories_of_run(value, folder))
    ):
        return
    near = difflib.get_close_matches(
        value, [file.parent.name for root in roots for file in root.glob("*/run.json")], 1
    )
    hint = f"did you mean {near[0]}?" if near else "give a run id or a checkpoint directory"
    raise UsageError(
        f"--resume-from {value}: no such run under {DEFAULT_ROOT}/ and no such directory; {hint}"
    )


def check_against_run(config: RunConfig, directory: RunDirectory, history: History) -> None:
    """Refuse to go back within a run, which would give up its newer checkpoints; print it if the value has no effect.

    A command that was launched before may be repeated: it continues the run.

    Args:
        directory: of the run, with the `run.json` of its last launch.

    Raises:
        UsageError: the value is an older checkpoint of this run, and the last launch did not name it.
    """
    value = config.resume_from
    if value is None or value == config.run_id:
        return
    named = _own_checkpoint(Path(value), config.run_id)
    newest = _newest(config.run_id, directory, history, Path(value) if named is not None else None)
    if newest is None or (named is not None and newest[:2] <= named[:2]):
        return
    repeated = directory.run_json.is_file() and directory.read_run().get("resume_from") == value
    if named is not None and not repeated:
        raise UsageError(
            f"--resume-from {value}: run {config.run_id}, to which it belongs, has a newer {newest.place}; to start another"
            " run from it, add --fresh (and another --run-dir, if one is given); to continue from the newest, leave"
            " --resume-from out"
        )
    if history.finished:
        return  # nothing continues
    print(
        f"grpo-run: --resume-from {value} has no effect: run {config.run_id} continues from its own newest checkpoint or snapshot;"
        " with --fresh, another run starts from it"
    )


def _own_checkpoint(path: Path, run_id: str) -> _Saved | None:
    """Return the checkpoint in a directory if it is of this run."""
    if not (path / MANIFEST).is_file():
        return None
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return None  # the ranks say what is wrong with it
    if manifest.run_id != run_id:
        return None
    return _Saved(manifest.train_call.ordinal, manifest.step, str(path))


def _newest(run_id: str, directory: RunDirectory, history: History, named: Path | None) -> _Saved | None:
    """Return the newest checkpoint or snapshot of a run in the directories that are known."""
    folders = [Path(one.path) for call in history.calls for one in call.directories]
    known = [named] if named is not None else []
    if history.checkpoint is not None:
        known.append(Path(history.checkpoint.path))
    folders += [output_directory_of(path.resolve()) for path in known]
    saved = [
        _Saved(found.manifest.train_call.ordinal, found.manifest.step, f"checkpoint, {found.path}")
        for found in find_checkpoints(*directories_of_run(run_id, *folders))
        if found.manifest.run_id == run_id
    ]
    if history.snapshot_step is not None and directory.run_json.is_file():
        areas = recorded_areas(directory.read_run())
        if any(any(area.glob(f"*/{STAGED}")) for area in areas):
            place = f"snapshot in memory, of step {history.snapshot_step}"
            saved.append(_Saved(history.train_call, history.snapshot_step, place))
    return max(saved, default=None)


def _output_directories(script_arguments: Sequence[str]) -> Iterator[Path]:
    for word in script_arguments:
        folder = Path(word.rpartition("=")[2])
        if "\0" not in word and folder.is_dir():
            yield folder
    for above in ("", "*/", "*/*/"):
        for name in ("checkpoint-*", f"{SNAPSHOTS}/*/*/snapshot-*"):
            manifests = Path().glob(f"{above}{name}/{MANIFEST}")
            yield from sorted({output_directory_of(manifest.parent) for manifest in manifests})
