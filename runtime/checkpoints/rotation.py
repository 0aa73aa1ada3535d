"""Which older checkpoints go when a new one is there: the script's `save_total_limit`, and snapshots that were superseded.

As transformers rotates, but after the new one is complete and on disk, so that there is always one; called by the
drainer and by the guard when it saves directly. What is removed loses its name first: a crash leaves nothing that
looks like a checkpoint. Never touches the newest, the best, a finished call's last one, or another run's snapshots.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import LOCK, MANIFEST, Manifest, read_manifest, step_of
from grpo_run.runtime.checkpoints.publishing import remove
from grpo_run.runtime.errors import CheckpointError


def rotate(directory: Path, *, newest: Path, limit: int | None, best: str | None) -> list[Path]:
    """Remove what is due.

    Args:
        directory: an `output_dir`.
        newest: just published and verified; it stays.
        limit: how many to keep, the newest counted; None or 0 for all (transformers' `save_total_limit`).
        best: directory name of the script's best checkpoint, which stays beside them.

    Returns:
        What was removed.
    """
    new = read_manifest(newest)
    best = best if best != newest.name else None
    scheduled, superseded = [], []
    for path in directory.iterdir():
        if step_of(path) is None or path.name == newest.name or not path.is_dir() or path.is_symlink():
            continue
        manifest = _manifest(path)
        if manifest is not None and manifest.finished:
            continue
        same_call = manifest is not None and manifest.call_of_run == new.call_of_run
        if manifest is not None and not manifest.scheduled and path.name != best:
            # snapshots are not always made durable in their order: a later one is not superseded
            if same_call and manifest.step < new.step and _untouched(path, manifest):
                superseded.append(path)
        else:
            later = same_call and manifest is not None and manifest.step > new.step
            scheduled.append((path, later))
    return [path for path in (*superseded, *_surplus(scheduled, new, limit, best)) if _remove(path)]


def _untouched(path: Path, manifest: Manifest) -> bool:
    """Nobody has added anything to a snapshot: a script may write into any directory of its own."""
    ours = {MANIFEST, LOCK, *manifest.files}
    return all(
        str(file.relative_to(path)) in ours
        for file in path.rglob("*")
        if file.is_symlink() or not file.is_dir()
    )


def _surplus(
    others: list[tuple[Path, bool]], new: Manifest, limit: int | None, best: str | None
) -> list[Path]:
    """What is over the limit, of other checkpoints and whether they are later ones of the same call."""
    if not limit or limit < 0:
        return []
    stay = [path for path, later in others if later or path.name == best]
    if limit == 1 and best is not None:
        limit = 2  # transformers keeps the last beside the best, to resume from
    may_go = sorted((path for path, _ in others if path not in stay), key=_age)
    kept = limit - int(new.scheduled) - len(stay)
    return may_go[: max(0, len(may_go) - max(0, kept))]


def _age(path: Path) -> tuple[float, int]:
    """Oldest first; copies and some file systems give all the same time."""
    try:
        written_at = path.stat().st_mtime
    except OSError:
        written_at = 0.0  # gone since
    return written_at, step_of(path) or 0


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None  # the script's own, or damaged: it is rotated as transformers would


def _remove(path: Path) -> bool:
    try:
        remove(path, path.name)
    except OSError:
        return False  # gone, or not ours to remove: rotation is no reason to fail
    return True
