"""What `grpo-run gc` may free, and what it keeps and why: decisions only, nothing is deleted here.

    memory       staging areas of deleted runs; those of dead runs, whose snapshots are written to disk first
    backup       links to checkpoints that a killed start has left, after missing checkpoints are put back
    checkpoint   rejected and replaced checkpoints, and partial ones that nobody writes any more
    target       addresses of metrics that killed launches have announced
    run          directories of runs that ended long ago; their checkpoints stay

Nothing of a live run is touched, and nothing where it cannot be told whether it is live. Called by
`cli.gc`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_run.runtime.catalog import RunEntry
from grpo_run.runtime.checkpoints.listing import CheckpointEntry, CheckpointState
from grpo_run.runtime.files import tree_bytes
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import target_file
from grpo_run.runtime.snapshots.leftovers import AreaEntry

DAY_SECONDS = 86_400.0
ENDED = ("finished", "failed")
"""States of runs that are deleted when they are old. A stopped run, and one whose supervisor was killed,
waits to be resumed."""

Kind = Literal["memory", "backup", "checkpoint", "target", "run"]


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """Something that nobody needs.

    Attributes:
        what: in words.
        written_first: a dead run could be resumed from it, so it is written to disk before it is freed.
        run: whose it is, where freeing it needs the lock of the run.
    """

    kind: Kind
    path: Path
    size_bytes: int
    what: str
    written_first: bool = False
    run: RunDirectory | None = None


@dataclass(frozen=True, kw_only=True)
class KeptMemory:
    """Something in memory that is kept, and why."""

    path: Path
    size_bytes: int
    reason: str


def memory(areas: Iterable[AreaEntry], runs: Sequence[RunEntry]) -> tuple[list[Leftover], list[KeptMemory]]:
    """Sort staging areas into those that can be freed and those that are kept.

    Args:
        areas: of this user.
        runs: the runs that are known, and those that the areas name.
    """
    dead = {area: run for run in runs if not run.live for area in run.areas}
    found, kept = [], []
    for area in areas:
        run = dead.get(area.path)
        if area.removable:
            name = f" {area.owner.run_id}" if area.owner is not None else ""
            what = f"memory of the run{name}, whose directory is gone or which has other memory"
            if area.unsaved:
                what += f"; it has the only copy of {', '.join(map(str, area.unsaved))}"
            found.append(Leftover(kind="memory", path=area.path, size_bytes=area.size_bytes, what=what))
        elif run is not None and area.made_here and not area.locked:
            what = f"memory of run {run.run_id} ({run.state}), after its snapshots are written to disk"
            found.append(
                Leftover(
                    kind="memory", path=area.path, size_bytes=area.size_bytes, what=what, written_first=True
                )
            )
        else:
            reason = area.kept_because or "its run is alive"
            kept.append(KeptMemory(path=area.path, size_bytes=area.size_bytes, reason=reason))
    return found, kept


def backups(runs: Iterable[RunEntry]) -> list[Leftover]:
    """Return the links to checkpoints that dead runs have left."""
    return [
        Leftover(
            kind="backup",
            path=folder.path,
            size_bytes=0 if folder.missing else tree_bytes(folder.path, linked=False),
            what=f"links to checkpoints of run {run.run_id}"
            + (f", after {', '.join(folder.missing)} are put back" if folder.missing else ""),
            run=run.directory,
        )
        for run in runs
        if not run.live
        for folder in run.backups
    ]


def checkpoints(
    entries: Iterable[CheckpointEntry],
    *,
    live_ids: Collection[str],
    run_of: Callable[[Path], str | None],
    is_abandoned: Callable[[Path], bool],
) -> list[Leftover]:
    """Return the checkpoints under other names that can be deleted.

    Args:
        entries: of output directories that no live run writes to.
        live_ids: of live runs; checkpoints that they have lost their name of are kept.
        run_of: returns the id of the run that wrote a checkpoint; None if unknown.
        is_abandoned: whether nobody writes a partial directory any more.
    """
    found = []
    for entry in entries:
        if entry.state is CheckpointState.partial:
            wanted, what = is_abandoned(entry.path), "partial checkpoint that no process writes any more"
        elif entry.state is CheckpointState.rejected:
            wanted, what = True, "damaged checkpoint" + (f": {entry.problem}" if entry.problem else "")
        elif entry.state is CheckpointState.replaced and entry.path.name.startswith("replaced-"):
            run_id = run_of(entry.path)
            wanted, what = (
                run_id not in live_ids,
                f"checkpoint of run {run_id or 'unknown'}, whose name was taken",
            )
        else:
            continue  # checkpoints, and directories between two renames
        if wanted:
            found.append(Leftover(kind="checkpoint", path=entry.path, size_bytes=entry.size_bytes, what=what))
    return found


def targets(runs: Iterable[RunEntry], registered: Iterable[Path], folder: Path) -> list[Leftover]:
    """Return the announced addresses of runs that are not live, or whose directory is gone.

    Args:
        registered: run directories; they may not exist any more.
        folder: of the announcements.
    """
    live = {run.directory.path.resolve() for run in runs if run.live}
    known = {run.directory.path.resolve() for run in runs} | {path.resolve() for path in registered}
    files = {path: target_file(path, folder) for path in sorted(known - live)}
    return [
        Leftover(
            kind="target", path=file, size_bytes=tree_bytes(file), run=RunDirectory(path=path),
            what=f"address of the metrics of the run in {path}, which is not live",
        )
        for path, file in files.items()
        if file.exists()
    ]  # fmt: skip


def old_runs(runs: Iterable[RunEntry], *, now: float, days: float) -> list[Leftover]:
    """Return the directories of runs that ended at least `days` days ago, and from which nothing has to be
    saved first.

    Args:
        now: seconds since the epoch.
    """
    return [
        Leftover(
            kind="run",
            path=run.directory.path,
            size_bytes=run.size_bytes,
            what=f"run {run.run_id}, {run.state} {(now - run.last_time) / DAY_SECONDS:.0f} days ago",
        )
        for run in runs
        if not run.live
        and run.state in ENDED
        and not run.memory_bytes
        and not run.backups
        and now - run.last_time >= days * DAY_SECONDS
    ]
