"""What lies in a directory of checkpoints, and in what state: for people, through `grpo-run checkpoints`.

Looks at names, manifests, sizes and headers; reads whole files only when asked to verify. Changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints import completeness, publishing
from grpo_run.runtime.checkpoints import manifest as checkpoints
from grpo_run.runtime.checkpoints.manifest import Candidate, Manifest
from grpo_run.runtime.errors import CheckpointError


class State(str, Enum):
    """What a directory is. Only `published` and `complete` can be gone on from."""

    published = "published"
    """Has a manifest, and every file has the size it says."""
    complete = "complete"
    """No manifest, but all the parts: written without us."""
    incomplete = "incomplete"
    """No manifest, and parts are missing: half written, or the weights alone."""
    damaged = "damaged"
    """Its manifest or its files are not what was written."""
    partial = "partial"
    """Being written, or left by who died writing it."""
    rejected = "rejected"
    """Found bad when a run wanted to go on from it, and renamed."""
    replaced = "replaced"
    """Another run's, whose name was taken."""

    def __str__(self) -> str:
        return self.value


ASIDE = (State.partial, State.rejected, State.replaced)
"""Under another name than a checkpoint's: nobody loads them."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One directory. `when` is the wall time of its last change in seconds."""

    path: Path
    step: int
    state: State
    size_bytes: int
    when: float
    manifest: Manifest | None = None
    ranks: int | None = None
    problem: str | None = None
    verified: bool | None = None
    """By digests; None when they were not looked at, or there are none."""

    def as_json(self) -> dict[str, Any]:
        """The public form, as in `grpo-run checkpoints list --json`."""
        manifest = self.manifest
        return {
            "path": str(self.path),
            "step": self.step,
            "state": str(self.state),
            "when": self.when,
            "size_bytes": self.size_bytes,
            "ranks": self.ranks,
            "scheduled": manifest.scheduled if manifest else None,
            "finished": manifest.finished if manifest else None,
            "run": manifest.run_id if manifest else None,
            "train_call": manifest.train_call.ordinal if manifest else None,
            "global_batch": manifest.global_batch if manifest else None,
            "layout": manifest.layout if manifest else None,
            "verified": self.verified,
            "problem": self.problem,
        }


def take(directory: Path, *, verify: bool = False) -> list[Entry]:
    """Every checkpoint of a directory and what lies aside there, newest step first.

    Args:
        directory: an `output_dir`, or one `checkpoint-N`.
        verify: compare digests, and the checksums in torch's files where there is no manifest.
    """
    if checkpoints.step_of(directory) is not None:
        return [look(_candidate(directory), verify=verify)]
    entries = [look(candidate, verify=verify) for candidate in checkpoints.candidates(directory)]
    return sorted([*entries, *_aside(directory)], key=lambda entry: (-entry.step, entry.path.name))


def _candidate(path: Path) -> Candidate:
    return next(one for one in checkpoints.candidates(path.parent) if one.path.name == path.name)


def look(candidate: Candidate, *, verify: bool) -> Entry:
    """One `checkpoint-N`."""
    path, manifest, problem = candidate.path, candidate.manifest, candidate.problem
    verified: bool | None = None
    if manifest is not None:
        state = State.published
        try:
            (checkpoints.verify if verify else checkpoints.verify_sizes)(path, manifest)
            verified = True if verify else None
        except CheckpointError as error:
            state, problem, verified = State.damaged, str(error), False
    elif (path / checkpoints.MANIFEST).exists():
        state, verified = State.damaged, False
    else:
        lacks = completeness.missing(path, deep=verify)
        state, problem = (State.incomplete, ", ".join(lacks)) if lacks else (State.complete, None)
    return Entry(
        path=path,
        step=candidate.step,
        state=state,
        size_bytes=_size(path),
        when=_when(path),
        manifest=manifest,
        ranks=manifest.world_size if manifest else completeness.ranks(path),
        problem=problem,
        verified=verified,
    )


def _aside(directory: Path) -> Iterator[Entry]:
    kinds = (
        (publishing.PARTIAL, State.partial),
        (publishing.REPLACING, State.replaced),
        (publishing.REJECTED, State.rejected),
        (publishing.REPLACED, State.replaced),
    )
    for path in directory.iterdir() if directory.is_dir() else ():
        for pattern, state in kinds:
            match = pattern.fullmatch(path.name)
            if match is not None and path.is_dir():
                yield Entry(
                    path=path,
                    step=int(match[1].rpartition("-")[2]),
                    state=state,
                    size_bytes=_size(path),
                    when=_when(path),
                    problem=_reason(path) if state is State.rejected else None,
                )


def _reason(path: Path) -> str | None:
    try:
        value = json.loads((path / publishing.REASON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(value.get("reason")) if isinstance(value, dict) else None


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # gone since it was listed
    return total


def _when(path: Path) -> float:
    try:
        manifest = path / checkpoints.MANIFEST
        return (manifest if manifest.exists() else path).stat().st_mtime
    except OSError:
        return 0.0


def output_directories(records: Iterable[dict[str, Any]]) -> list[Path]:
    """Where a run has published checkpoints, from its journal, in the order it began to."""
    places = (
        Path(record["path"]).parent
        for record in records
        if record["event"] == "checkpoint_published" and isinstance(record.get("path"), str)
    )
    return list(dict.fromkeys(places))
