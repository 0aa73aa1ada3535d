"""Delete checkpoints over the script's `save_total_limit`, and superseded snapshots, after a save.

Follows transformers' rotation, but deletes only after the new checkpoint is complete and on disk, so a
loadable checkpoint always exists. Counts and deletes only what the same run has published: nothing of another
run, and no checkpoint without a manifest. Called by the drain worker, and by the ranks when they save
directly. Never deletes the newest checkpoint, the best one, the last one of a finished `train()` call, or a
snapshot that the user has asked for. `listing.py` is the user's command for the same purpose.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import LOCK, MANIFEST, Manifest, read_manifest
from grpo_run.runtime.checkpoints.publishing import remove_checkpoint, remove_empty_folders
from grpo_run.runtime.checkpoints.search import find_checkpoints, snapshot_places, step_of


def rotate(
    directory: Path, *, newest: Path, limit: int | None, best: str | None, fence: Path | None = None
) -> list[Path]:
    """Delete the checkpoints that `newest` makes unnecessary.

    Args:
        directory: an `output_dir`.
        newest: the checkpoint just published and verified; never deleted.
        limit: number of scheduled checkpoints to keep, including the newest (transformers'
            `save_total_limit`); None or 0 keeps all. Those that the user asked for do not count.
        best: directory name of the script's best checkpoint, which is kept in addition.
        fence: of the attempt (`fencing.py`); None on one host.

    Returns:
        The deleted directories.
    """
    new = read_manifest(newest)
    scheduled = []
    for found in find_checkpoints(directory):
        path, manifest = found.path, found.manifest
        if path.name == newest.name or path.is_symlink():
            continue
        if manifest.run_id != new.run_id or manifest.finished or manifest.kept:
            continue
        same_call = manifest.train_call_key == new.train_call_key
        scheduled.append((path, same_call and manifest.step > new.step))
    # a snapshot changes nothing of what an undisturbed run would keep
    over_limit = _over_limit(scheduled, new, limit, best) if new.scheduled else []
    folders = snapshot_places(directory, *new.train_call_key)
    superseded = _superseded_snapshots(folders, newest, new)
    removed = [path for path in (*superseded, *over_limit) if _try_to_remove(path, fence)]
    for folder in folders:
        remove_empty_folders(folder)
    return removed


def scheduled_to_keep(limit: int | None, *, best: str | None, newest: str) -> int | None:
    """Return how many scheduled checkpoints `save_total_limit` keeps, the newest included; None for all.

    Args:
        limit: the script's.
        best: directory name of its best checkpoint.
        newest: directory name of its newest one.
    """
    if not limit or limit < 0:
        return None
    # transformers keeps the last one beside the best, to resume from
    return max(limit, 2) if best not in (None, newest) else limit


def _superseded_snapshots(folders: tuple[Path, ...], newest: Path, new: Manifest) -> list[Path]:
    """Return the snapshots of the same call that are not newer than the checkpoint just published."""
    found = []
    for candidate in find_checkpoints(*folders):
        path, manifest = candidate.path, candidate.manifest
        if path == newest or manifest.kept or manifest.finished or not _has_only_our_files(path, manifest):
            continue
        if manifest.step < new.step or (new.scheduled and manifest.step == new.step):
            found.append(path)
    return found


def _has_only_our_files(path: Path, manifest: Manifest) -> bool:
    """Return True if no files were added. A script may write into any of its directories."""
    ours = {MANIFEST, LOCK, *manifest.files}
    return all(
        str(file.relative_to(path)) in ours
        for file in path.rglob("*")
        if file.is_symlink() or not file.is_dir()
    )


def _over_limit(
    others: list[tuple[Path, bool]], new: Manifest, limit: int | None, best: str | None
) -> list[Path]:
    """Return the oldest checkpoints over the limit.

    Args:
        others: all scheduled checkpoints but the newest, each with whether it is a later one of the same
            call.
    """
    keep = scheduled_to_keep(limit, best=best, newest=new.folder)
    if keep is None:
        return []
    kept = [path for path, is_later in others if is_later or path.name == best]
    removable = sorted((path for path, _ in others if path not in kept), key=_age_key)
    remaining = keep - int(new.scheduled and not new.kept) - len(kept)
    return removable[: max(0, len(removable) - max(0, remaining))]


def _age_key(path: Path) -> tuple[float, int]:
    """Sort key, oldest first. The step decides where a copy or the file system gave all the same time."""
    try:
        modified_at = path.stat().st_mtime
    except OSError:
        modified_at = 0.0  # removed meanwhile
    return modified_at, step_of(path) or 0


def _try_to_remove(path: Path, fence: Path | None) -> bool:
    try:
        remove_checkpoint(path, path.name, fence=fence)
    except OSError:
        return False  # already removed, or not removable: rotation must not fail the save
    return True
