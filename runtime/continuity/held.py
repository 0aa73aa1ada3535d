"""Keep a run's checkpoints while its script starts: some scripts clear their output directory first.

Before each attempt the supervisor makes hard links of the checkpoints (`HeldCheckpoints`). When the ranks are about to
choose one, rank 0 puts back those that are gone (`put_back`). Nothing is copied. Links need one file system:
the run directory's, else the output directory's parent; where neither works, nothing is held.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.publishing import make_directory
from grpo_run.runtime.checkpoints.search import directories_of_run, find_checkpoints
from grpo_run.runtime.continuity.train_calls import TrainCalls
from grpo_run.runtime.errors import CheckpointError

MAX_HELD = 64
"""Checkpoints of one directory that are held, newest first."""


class HeldCheckpoints:
    """The hard links of one run, for its supervisor.

    Args:
        run_directory: of the run.
        run_id: checkpoints of other runs are not held.
        calls: the run's calls; the checkpoints in their directories are held.
    """

    def __init__(self, run_directory: Path, run_id: str, calls: TrainCalls) -> None:
        self._run_directory = run_directory
        self._run_id = run_id
        self._calls = calls
        self._held: list[str] | None = None

    def hold(self) -> None:
        """Make links of all complete checkpoints of the run. Links that an earlier supervisor left are removed."""
        self._held = list(dict.fromkeys(one.path for call in self._calls for one in call.directories))
        _remove(self._run_directory, self._held)
        for directory in self._held:
            places = directories_of_run(self._run_id, Path(directory))
            own = (one for one in find_checkpoints(*places) if one.manifest.run_id == self._run_id)
            found = list(itertools.islice(own, MAX_HELD))
            for place in _places(self._run_directory, directory) if found else ():
                with suppress(OSError):
                    place.mkdir(parents=True, exist_ok=True, mode=0o700)
                if all(_link_tree(one.path, place / one.path.relative_to(directory)) for one in found):
                    break
                shutil.rmtree(place, ignore_errors=True)

    def release(self) -> None:
        """Remove the links: the script has started. The checkpoints are not changed."""
        if self._held is not None:
            _remove(self._run_directory, self._held)
            self._held = None


def put_back(run_directory: Path, run_id: str, directory: str) -> list[str]:
    """Restore the held checkpoints of an output directory if the newest is missing there. Returns their names.

    If the newest exists, older ones were rotated away. A name that exists is left alone.
    """
    restored = []
    for place in _places(run_directory, directory):
        found = list(find_checkpoints(*directories_of_run(run_id, place)))
        if found and (Path(directory) / found[0].path.relative_to(place)).exists():
            continue
        for held in found:
            target = Path(directory) / held.path.relative_to(place)
            if held.manifest.run_id != run_id or target.exists():
                continue
            make_directory(target.parent)
            if _link_tree(held.path, target):
                restored.append(held.path.name)
            else:
                shutil.rmtree(target, ignore_errors=True)
    return restored


def _remove(run_directory: Path, directories: Iterable[str]) -> None:
    for directory in directories:
        for place in _places(run_directory, directory):
            shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):
        (run_directory / "held").rmdir()


def _places(run_directory: Path, directory: str) -> tuple[Path, Path]:
    """Where the checkpoints of an output directory may be held, in the order of preference."""
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
    return run_directory / "held" / digest, Path(
        directory
    ).parent / f".grpo-run-held-{run_directory.name}-{digest}"


def _link_tree(source: Path, target: Path) -> bool:
    """Link every file of a checkpoint, its manifest last. Return whether all of it could be linked."""
    try:
        names = sorted(
            (str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()),
            key=lambda name: name == MANIFEST,
        )
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / name, target / name)
        read_manifest(target)
    except (OSError, CheckpointError):
        return False  # another file system, or removed meanwhile
    return True
