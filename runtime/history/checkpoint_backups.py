"""Keep a run's checkpoints while its script starts: some scripts clear their output directory first.

Before each attempt the supervisor makes hard links of the checkpoints (`CheckpointBackups`). When the ranks
are about to choose one, rank 0 puts back those that are gone (`put_back`). If the start does not get so
far, the next start puts them back, or the end of the run. Nothing is copied. Links need one file system: the
run directory's, else the output directory's parent; where neither works, nothing is kept.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.manifest import LOCK, MANIFEST, Manifest, read_manifest
from grpo_run.runtime.checkpoints.publishing import partial_directory, publish
from grpo_run.runtime.checkpoints.search import (
    FoundCheckpoint,
    directories_of_run,
    find_checkpoints,
    place_within,
)
from grpo_run.runtime.errors import CheckpointError, SupersededError
from grpo_run.runtime.history.train_calls import TrainCalls

MAX_BACKUPS = 64
"""Checkpoints of one directory that are kept, newest first."""


class CheckpointBackups:
    """The hard links of one run, for its supervisor.

    Args:
        folder: of links in the run directory.
        run_id: checkpoints of other runs are not kept.
        calls: the run's calls; the checkpoints in their directories are kept.
        warn: called with what was put back.
    """

    def __init__(self, folder: Path, run_id: str, calls: TrainCalls, warn: Callable[[str], None]) -> None:
        self._folder = folder
        self._run_id = run_id
        self._calls = calls
        self._warn = warn
        self._directories: list[str] = []
        self._starting = False

    def make(self) -> None:
        """Make links of all complete checkpoints of the run.

        Links are left if the last start committed no step. What is missing is put back from them first.
        """
        self._directories, self._starting = self._calls.output_directories, True
        self._put_back(self._directories)
        still_missing = self._remove()
        for directory in self._directories:
            if directory in still_missing:
                continue  # its links are all that is left, and stay
            places = directories_of_run(self._run_id, Path(directory))
            own = (one for one in find_checkpoints(*places) if one.manifest.run_id == self._run_id)
            found = list(itertools.islice(own, MAX_BACKUPS))
            for place in _places(self._folder, directory) if found else ():
                with suppress(OSError):
                    place.mkdir(parents=True, exist_ok=True, mode=0o700)
                if all(_link_tree(one.path, place / place_within(one.path)) for one in found):
                    break
                shutil.rmtree(place, ignore_errors=True)

    def release(self) -> None:
        """Remove the links, except the last ones of a checkpoint: the script has started. The checkpoints
        are not changed.

        Called after every committed step; only the first one of an attempt has something to remove.
        """
        if self._starting:
            self._starting = False
            self._remove()

    def forget(self) -> None:
        """Remove the links: checkpoints were set aside on purpose, and must not be put back."""
        remove(self._folder, self._directories or self._calls.output_directories)

    def end(self, *, finished: bool) -> None:
        """Remove the links when all ranks have ended; put back what is missing, unless the run has
        finished."""
        if finished:
            remove(self._folder, self._directories)
        else:
            self._put_back(self._directories)
            self._remove()

    def _remove(self) -> list[str]:
        """Remove the links; return the output directories whose links are the last ones of a checkpoint,
        and stay."""
        last = [one for one in self._directories if has_last_copies(self._folder, self._run_id, one)]
        remove(self._folder, (directory for directory in self._directories if directory not in last))
        return last

    def _put_back(self, directories: Iterable[str]) -> None:
        for directory in directories:
            fence = fencing.recorded(self._folder.parent, directory)
            names = put_back(self._folder, self._run_id, directory, fence=fence)
            if names:
                self._warn(put_back_sentence(names, directory))


def has_last_copies(folder: Path, run_id: str, directory: str) -> bool:
    """Return whether links to checkpoints of an output directory are all that is left of them.

    Args:
        folder: of links in the run directory.
        directory: the output directory.
    """
    return any(place.is_dir() and _missing(place, run_id, directory) for place in _places(folder, directory))


def put_back(folder: Path, run_id: str, directory: str, *, fence: Path | None = None) -> list[str]:
    """Restore the backups of an output directory if the newest is missing there. Returns their names.

    If it or a newer one exists, older ones were rotated away. A name that exists is left alone.

    Args:
        folder: of links in the run directory.
        directory: the output directory.
        fence: of the attempt (`runtime/checkpoints/fencing.py`); None on one host.
    """
    restored = []
    for place in _places(folder, directory):
        for backup, target in _missing(place, run_id, directory):
            if _restore(backup, target, fence):
                restored.append(target.name)
    return restored


def _restore(backup: FoundCheckpoint, target: Path, fence: Path | None) -> bool:
    """Give a checkpoint its name again; return whether it has it. Otherwise the backup stays."""
    try:
        with partial_directory(target.parent, backup.manifest.step) as partial:
            if not _link_tree(backup.path, partial):
                return False
            publish(partial, target, fence=fence)
    except (OSError, CheckpointError, SupersededError):
        return False
    return True


def put_back_sentence(names: Iterable[str], directory: str) -> str:
    """What users are told."""
    return f"the script has removed {', '.join(names)} in {directory}; restored"


def remove(folder: Path, directories: Iterable[str]) -> None:
    """Remove the links to the checkpoints of output directories."""
    for directory in directories:
        for place in _places(folder, directory):
            shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def _missing(place: Path, run_id: str, directory: str) -> list[tuple[FoundCheckpoint, Path]]:
    """Return the backups that are to be restored, each with where."""
    found = [
        (one, Path(directory) / place_within(one.path))
        for one in find_checkpoints(*directories_of_run(run_id, place))
        if one.manifest.run_id == run_id
    ]
    if not found:
        return []
    newest, path = max(found, key=lambda one: _position(one[0].manifest))
    there = find_checkpoints(*directories_of_run(run_id, Path(directory)))
    if path.exists() or any(
        one.manifest.run_id == run_id and _position(one.manifest) >= _position(newest.manifest)
        for one in there
    ):
        return []
    return [(one, target) for one, target in found if not target.exists()]


def _position(manifest: Manifest) -> tuple[int, int]:
    return manifest.train_call.ordinal, manifest.step


def _places(folder: Path, directory: str) -> tuple[Path, Path]:
    """Where the checkpoints of an output directory may be kept, in the order of preference."""
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
    beside = f".grpo-run-backups-{folder.parent.name}-{digest}"
    return folder / digest, Path(directory).parent / beside


def _link_tree(source: Path, target: Path) -> bool:
    """Link every file of a checkpoint, its manifest last. Return whether all of it could be linked."""
    try:
        names = sorted(
            (str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()),
            key=lambda name: name == MANIFEST,
        )
        for name in names:
            if name == LOCK:
                continue  # of a writer that was killed after it had published
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target / name)
        read_manifest(target)
    except (OSError, CheckpointError):
        return False  # another file system, or removed meanwhile
    return True
