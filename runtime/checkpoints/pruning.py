"""Select the checkpoints that `grpo-run checkpoints prune` deletes. Pure; deletes nothing.

A checkpoint is selected only if its digests were verified and enough newer verified checkpoints exist.
`rotation.py` is what a running job deletes by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_run.runtime.checkpoints.listing import CheckpointEntry, CheckpointState
from grpo_run.runtime.checkpoints.search import output_directory_of


def select_prunable(
    entries: Sequence[CheckpointEntry],
    *,
    keep: int,
    best: Iterable[str] = (),
    include_unusable: bool = False,
) -> list[CheckpointEntry]:
    """Return the entries to delete, oldest first.

    Args:
        entries: verified entries of any number of directories.
        keep: how many of the newest verified checkpoints to keep, at least 1, per directory, run and
            `train()` call. Those that the user asked for (`grpo-run save`) are kept in addition.
        best: names of checkpoints that a trainer recorded as its best; they are kept.
        include_unusable: select rejected and partial directories too. The caller must check that a partial
            directory is abandoned.
    """
    assert keep >= 1, "at least one verified checkpoint must be kept"
    groups: dict[tuple[Path, tuple[str, int]], list[CheckpointEntry]] = defaultdict(list)
    for entry in entries:
        if entry.state is CheckpointState.published and entry.verified and entry.manifest is not None:
            groups[output_directory_of(entry.path), entry.manifest.train_call_key].append(entry)
    kept_names = set(best)
    selected = [
        entry
        for group in groups.values()
        for entry in sorted(group, key=lambda entry: -entry.step)[keep:]
        if entry.path.name not in kept_names and entry.manifest is not None and not entry.manifest.kept
    ]
    if include_unusable:
        unusable = (CheckpointState.partial, CheckpointState.rejected)
        selected += [entry for entry in entries if entry.state in unusable]
    return sorted(selected, key=lambda entry: (entry.step, str(entry.path)))
