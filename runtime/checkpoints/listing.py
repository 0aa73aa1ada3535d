"""List the checkpoints in a directory with their state, and select those that a prune deletes.

For `grpo-run checkpoints`. Listing reads names, manifests, sizes and headers, and whole files only when
asked to verify. A checkpoint is selected for deletion only if its digests were verified and enough newer
verified checkpoints exist. Changes and deletes nothing; `rotation.py` is what a running job deletes by
itself.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.completeness import count_ranks, find_problems
from grpo_run.runtime.checkpoints.digests import verify_digests, verify_sizes
from grpo_run.runtime.checkpoints.manifest import MANIFEST, Manifest
from grpo_run.runtime.checkpoints.publishing import PARTIAL, REASON, REJECTED, REPLACED, REPLACING
from grpo_run.runtime.checkpoints.search import (
    Candidate,
    find_candidates,
    output_directory_of,
    read_candidate,
    snapshot_directories,
    step_of,
)
from grpo_run.runtime.errors import CheckpointError
from grpo_run.watchdog.text import TextEnum


class CheckpointState(TextEnum):
    """State of a checkpoint directory. Only `published` and `complete` checkpoints can be resumed from."""

    published = "published"
    """Has a manifest, and every file has the recorded size."""
    complete = "complete"
    """Has no manifest, but all required files: not written by grpo-run."""
    incomplete = "incomplete"
    """Has no manifest, and required files are missing: half written, or weights only."""
    damaged = "damaged"
    """The manifest or a file is not what was written."""
    partial = "partial"
    """Being written, or abandoned by a process that died while writing it."""
    rejected = "rejected"
    """Found damaged when a run tried to resume from it, and renamed."""
    replaced = "replaced"
    """A directory of another run or of the script, renamed because its name was needed."""


RENAMED_STATES = (CheckpointState.partial, CheckpointState.rejected, CheckpointState.replaced)
"""States of directories that do not have a checkpoint's name and are never loaded."""


@dataclass(frozen=True, kw_only=True)
class CheckpointEntry:
    """One listed directory.

    Attributes:
        modified_at: time of the last change, in seconds since the epoch.
        ranks: number of ranks that wrote it; None if unknown.
        problem: why it cannot be used; None if it can.
        verified: result of comparing the digests; None if they were not compared or do not exist.
    """

    path: Path
    step: int
    state: CheckpointState
    size_bytes: int
    modified_at: float
    manifest: Manifest | None = None
    ranks: int | None = None
    problem: str | None = None
    verified: bool | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the public form, as in `grpo-run checkpoints list --json`."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "step": self.step,
            "state": str(self.state),
            "when": self.modified_at,
            "size_bytes": self.size_bytes,
            "ranks": self.ranks,
            "scheduled": manifest.scheduled if manifest else None,
            "kept": manifest.kept if manifest else None,
            "finished": manifest.finished if manifest else None,
            "run": manifest.run_id if manifest else None,
            "train_call": manifest.train_call.ordinal if manifest else None,
            "global_batch": manifest.global_batch if manifest else None,
            "layout": manifest.layout if manifest else None,
            "verified": self.verified,
            "problem": self.problem,
        }


def list_checkpoints(directory: Path, *, verify: bool = False) -> list[CheckpointEntry]:
    """Return every checkpoint and snapshot of a directory and its renamed ones, newest step first.

    Args:
        directory: an `output_dir`, or one `checkpoint-N`.
        verify: compare digests, and the checksums in torch's files where there is no manifest.
    """
    step = step_of(directory)
    if step is not None:
        return [_describe(read_candidate(directory, step), verify=verify)]
    directories = (directory, *snapshot_directories(directory))
    entries = [_describe(candidate, verify=verify) for candidate in find_candidates(*directories)]
    renamed = [entry for one in directories for entry in _renamed(one)]
    return sorted([*entries, *renamed], key=lambda entry: (-entry.step, entry.path.name))


def _describe(candidate: Candidate, *, verify: bool) -> CheckpointEntry:
    path, manifest, problem = candidate.path, candidate.manifest, candidate.problem
    verified: bool | None = None
    if manifest is not None:
        state = CheckpointState.published
        try:
            (verify_digests if verify else verify_sizes)(path, manifest.files)
            verified = True if verify else None
        except CheckpointError as error:
            state, problem, verified = CheckpointState.damaged, str(error), False
    elif (path / MANIFEST).exists():
        state, verified = CheckpointState.damaged, False
    else:
        problem = ", ".join(find_problems(path, verify_checksums=verify)) or None
        state = CheckpointState.incomplete if problem else CheckpointState.complete
    return CheckpointEntry(
        path=path,
        step=candidate.step,
        state=state,
        size_bytes=_size_bytes(path),
        modified_at=_modified_at(path),
        manifest=manifest,
        ranks=manifest.world_size if manifest else count_ranks(path),
        problem=problem,
        verified=verified,
    )


def _renamed(directory: Path) -> Iterator[CheckpointEntry]:
    kinds = (
        (PARTIAL, CheckpointState.partial),
        (REPLACING, CheckpointState.replaced),
        (REJECTED, CheckpointState.rejected),
        (REPLACED, CheckpointState.replaced),
    )
    for path in directory.iterdir() if directory.is_dir() else ():
        for pattern, state in kinds:
            match = pattern.fullmatch(path.name)
            if match is not None and path.is_dir():
                yield CheckpointEntry(
                    path=path,
                    step=int(match[1].rpartition("-")[2]),
                    state=state,
                    size_bytes=_size_bytes(path),
                    modified_at=_modified_at(path),
                    problem=_rejection_reason(path) if state is CheckpointState.rejected else None,
                )


def _rejection_reason(path: Path) -> str | None:
    try:
        value = json.loads((path / REASON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(value.get("reason")) if isinstance(value, dict) else None


def _size_bytes(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # removed since it was listed
    return total


def _modified_at(path: Path) -> float:
    try:
        manifest = path / MANIFEST
        return (manifest if manifest.exists() else path).stat().st_mtime
    except OSError:
        return 0.0


def select_prunable(
    entries: Sequence[CheckpointEntry], *, keep: int, best: Iterable[str] = (), include_unusable: bool = False
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
