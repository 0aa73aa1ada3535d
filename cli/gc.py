"""`grpo-run gc [--dry-run] [--days N] [--disks-mounted] [--json]`: free what no run needs any more.

What may be freed is decided in `runtime.leftovers`. Everything is judged again under its lock before it is
deleted, because a run may have started meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.removal import areas_of, remove_folder, remove_run
from grpo_run.runtime import leftovers
from grpo_run.runtime.catalog import RunEntry, links_of, read_runs, run_directories
from grpo_run.runtime.checkpoints.listing import CheckpointEntry, list_checkpoints
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.checkpoints.publishing import is_abandoned
from grpo_run.runtime.errors import CheckpointError, ConfigError, RunDirectoryError
from grpo_run.runtime.history import checkpoint_backups
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.leftovers import KeptMemory, Leftover
from grpo_run.runtime.registry import registered, registry_folder, targets_folder
from grpo_run.runtime.snapshots.leftovers import AreaEntry, remove_area
from grpo_run.watchdog.text import size_text

EXIT_INCOMPLETE = 1
"""Something that was to be freed is still there."""
DEFAULT_DAYS = 30.0


def main(arguments: Sequence[str]) -> int:
    """Free what is left, or list it with `--dry-run`; returns 0, or 1 (`EXIT_INCOMPLETE`)."""
    parser = CommandParser(
        prog="grpo-run gc",
        description=(
            "Free what no run needs: shared memory of dead runs (snapshots that a run could resume from are"
            " written to disk first), links to checkpoints that a killed start has left, rejected, replaced"
            " and abandoned partial checkpoints in the output directories of runs, addresses of metrics that"
            " killed launches have announced, and directories of runs that ended long ago. Live runs are not"
            " touched."
        ),
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be freed, and change nothing")
    parser.add_argument(
        "--days",
        type=float,
        default=DEFAULT_DAYS,
        metavar="N",
        help=(
            "age of finished and failed runs whose directories are deleted; their checkpoints stay"
            " (default: 30)"
        ),
    )
    parser.add_argument(
        "--disks-mounted",
        action="store_true",
        help=(
            "also free memory of runs whose directory and its parent are missing; only safe while every disk"
            " is mounted"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if not options.days >= 0:
        raise ConfigError(f"--days {options.days:g}: must be 0 or more")
    found, kept = find_leftovers(options.days, disks_are_mounted=options.disks_mounted)
    freed, failed = [], []
    for leftover in found:
        problem = None if options.dry_run else free(leftover, disks_are_mounted=options.disks_mounted)
        if problem is None:
            freed.append(leftover)
        else:
            failed.append(KeptMemory(path=leftover.path, size_bytes=leftover.size_bytes, reason=problem))
        if not options.json:
            verb = "would free" if options.dry_run else "freed" if problem is None else "could not free"
            print(f"{verb} {leftover.path} ({size_text(leftover.size_bytes)}): {problem or leftover.what}")
    total = sum(leftover.size_bytes for leftover in freed)
    if options.json:
        value = {
            "would_free" if options.dry_run else "freed": [_freed_json(one) for one in freed],
            "not_freed": [_kept_json(one) for one in failed],
            "kept": [_kept_json(one) for one in kept],
            "bytes": total,
        }
        print(json.dumps(value, indent=2))
    else:
        for one in kept:
            print(f"kept {one.path} ({size_text(one.size_bytes)}): {one.reason}")
        done = "would be freed" if options.dry_run else "freed"
        print(f"{len(freed)} of {len(found)}, {size_text(total)} {done}" if found else "nothing to free")
    return EXIT_INCOMPLETE if failed else 0


def _freed_json(one: Leftover) -> dict[str, object]:
    return {"kind": one.kind, "path": str(one.path), "bytes": one.size_bytes, "what": one.what}


def _kept_json(one: KeptMemory) -> dict[str, object]:
    return {"path": str(one.path), "bytes": one.size_bytes, "reason": one.reason}


def find_leftovers(days: float, *, disks_are_mounted: bool) -> tuple[list[Leftover], list[KeptMemory]]:
    """Return what can be freed, and what in memory is kept.

    Args:
        days: age of runs whose directories are deleted.
        disks_are_mounted: a missing folder was deleted, and is not on an unmounted disk.
    """
    paths = run_directories()
    areas = areas_of(paths, disks_are_mounted=disks_are_mounted)
    runs = read_runs([*paths, *_named_by(areas, paths)], areas)
    found, kept = leftovers.memory(areas, runs)
    found += leftovers.backups(runs)
    found += leftovers.checkpoints(
        _renamed_checkpoints(runs),
        live_ids={run.run_id for run in runs if run.live},
        run_of=_run_of,
        is_abandoned=is_abandoned,
    )
    folder = targets_folder()
    if folder is not None:
        found += leftovers.targets(runs, registered(registry_folder()), folder)
    return found + leftovers.old_runs(runs, now=time.time(), days=days), kept


def _named_by(areas: Sequence[AreaEntry], known: Sequence[Path]) -> list[Path]:
    """The run directories that areas in memory name, and that neither `runs/` nor the registry does."""
    seen = {path.resolve() for path in known}
    named = {area.owner.directory for area in areas if area.made_here and area.owner is not None}
    return sorted(path for path in named if path.resolve() not in seen and (path / "run.json").is_file())


def _renamed_checkpoints(runs: Sequence[RunEntry]) -> list[CheckpointEntry]:
    """The checkpoints in output directories of dead runs to which no live run writes."""
    directories = {
        live: {
            Path(path).resolve()
            for run in runs
            if run.live is live and run.status is not None
            for path in run.status.history.calls.output_directories
        }
        for live in (False, True)
    }
    return [
        entry
        for directory in sorted(directories[False] - directories[True])
        if directory.is_dir()
        for entry in list_checkpoints(directory)
    ]


def _run_of(checkpoint: Path) -> str | None:
    try:
        return read_manifest(checkpoint).run_id
    except CheckpointError:
        return None


def free(leftover: Leftover, *, disks_are_mounted: bool = False) -> str | None:
    """Free something; returns why it was kept, or None.

    Args:
        disks_are_mounted: as of `find_leftovers`.
    """
    try:
        if leftover.kind == "run":
            remove_run(RunDirectory(path=leftover.path))
            return None
        if leftover.kind == "checkpoint":
            return remove_folder(leftover.path)
        if leftover.kind == "memory":
            if leftover.written_first:
                return _write_and_free(leftover.path)
            reasons: list[str] = []
            freed = remove_area(leftover.path, reasons.append, disks_are_mounted=disks_are_mounted)
            return None if freed is not None else reasons[0]
        assert leftover.run is not None
        # the run may have been launched again; one that is gone has no lock
        with leftover.run.locked() if leftover.run.path.is_dir() else nullcontext():
            if leftover.kind == "backup":
                return _put_back_and_delete(leftover.run, leftover.path)
            leftover.path.unlink(missing_ok=True)
            return None
    except RunDirectoryError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


def _put_back_and_delete(run: RunDirectory, path: Path) -> str | None:
    """Put back checkpoints that exist only as these links, as the next supervisor would, and delete the
    links. The run is locked.
    """
    status = RunReader(run).read()
    for links in (links for links in links_of(run, status) if links.path == path):
        if links.missing:
            checkpoint_backups.put_back(run.checkpoint_backups, status.run_id, links.output_dir)
            left = [one for one in links_of(run, status) if one.path == path and one.missing]
            if left:
                return f"{left[0].missing[0]} could not be put back in {links.output_dir}"
    problem = remove_folder(path)
    with suppress(OSError):  # other links are in it
        run.checkpoint_backups.rmdir()
    return problem


def _write_and_free(area: Path) -> str | None:
    """Write the snapshots of a dead run to disk as its next supervisor would, then free their memory."""
    from grpo_run.cli.launching import staging
    from grpo_run.runtime.snapshots.ownership import read_owner

    owner = read_owner(area)
    if owner is None:
        return "it is gone"
    run = RunDirectory(path=owner.directory)
    with run.locked():
        found = staging.find(run, owner.run_id)
        if found is None or found.path != area:
            if found is not None:
                os.close(found.lock)
            return "its run uses other memory now"
        reasons: list[str] = []
        staging.write_kept_checkpoints(found, run, owner.run_id, RunReader(run).history(), reasons.append)
    return None if not area.exists() else "; ".join(reasons) or "its snapshots could not be written to disk"
