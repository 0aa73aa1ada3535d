"""Early check of `--resume-from`: refuse a name that cannot be a run or a checkpoint before ranks start.

Called by `parse.py`. The ranks check the checkpoint itself: its digests, and whether it fits the model and
the batch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.manifest import MANIFEST
from grpo_run.runtime.checkpoints.search import (
    SNAPSHOTS,
    directories_of_run,
    find_checkpoints,
    output_directory_of,
)
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.record.run_directory import DEFAULT_ROOT


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


def _output_directories(script_arguments: Sequence[str]) -> Iterator[Path]:
    for word in script_arguments:
        folder = Path(word.rpartition("=")[2])
        if "\0" not in word and folder.is_dir():
            yield folder
    for above in ("", "*/", "*/*/"):
        for name in ("checkpoint-*", f"{SNAPSHOTS}/*/*/snapshot-*"):
            manifests = Path().glob(f"{above}{name}/{MANIFEST}")
            yield from sorted({output_directory_of(manifest.parent) for manifest in manifests})
