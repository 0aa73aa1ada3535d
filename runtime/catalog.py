"""The runs of a user, each with its state, age and size: shown by `grpo-run ls`, evaluated by `grpo-run gc`.

A run is found in `runs/` of the working directory or by the registry, and nowhere else: no file system is
searched. Called by every command that names a run. Reads only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import tree_bytes
from grpo_run.runtime.history.checkpoint_backups import BackupFolder, find_backups
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.registry import registered, registry_folder
from grpo_run.runtime.snapshots.leftovers import AreaEntry
from grpo_run.runtime.snapshots.ownership import recorded_areas

MAX_ASKED = 16
"""How many of the last launches are asked whether they have trained: a long journal takes a second."""


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run.

    Attributes:
        directory: of the run.
        status: as `grpo-run status` reads it; None if it cannot be read.
        problem: why it cannot be read; None if it can.
        last_time: of the last event, in seconds since the epoch.
        size_bytes: of the run directory, and of links to checkpoints beside an output directory. A linked
            checkpoint counts if it has no other name.
        memory_bytes: of the run's snapshots in shared memory.
        areas: the staging areas that `run.json` names.
        backups: links to checkpoints, which a killed start leaves.
    """

    directory: RunDirectory
    status: RunStatus | None
    problem: str | None
    last_time: float
    size_bytes: int
    memory_bytes: int
    areas: tuple[Path, ...]
    backups: tuple[BackupFolder, ...] = ()

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.directory.path.name if self.status is None else self.status.run_id

    @property
    def state(self) -> str:
        """The state of the run; `unreadable` if its files are damaged."""
        return "unreadable" if self.status is None else self.status.state

    @property
    def live(self) -> bool:
        """Whether a supervisor holds the run, or it cannot be told that none does."""
        return self.status is None or self.status.supervisor_pid is not None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `grpo-run ls --json` prints for the run."""
        history = None if self.status is None else self.status.history
        return {
            "run_id": self.run_id,
            "run_directory": str(self.directory.path),
            "state": self.state,
            "live": self.status is not None and self.live,
            "step": None if history is None else history.step,
            "target_steps": None if history is None else history.target_steps,
            "trains_without_trainer": None if history is None else history.no_trainer.seen,
            "exit_code": None if history is None else history.exit_code,
            "last_event_at": self.last_time,
            "size_bytes": self.size_bytes,
            "memory_bytes": self.memory_bytes,
            "problem": self.problem,
        }


def run_directories(root: Path = DEFAULT_ROOT, folder: Path | None = None) -> list[Path]:
    """Return the directories of all runs of this user that exist, without duplicates.

    Args:
        root: the folder of runs in the working directory.
        folder: the registry; None for the user's.
    """
    local = sorted(file.parent for file in root.glob("*/run.json"))
    others = registered(folder or registry_folder())
    found: dict[Path, Path] = {}
    for path in [*local, *others]:
        if _is_run(path):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_runs(paths: Iterable[Path], areas: Sequence[AreaEntry]) -> list[RunEntry]:
    """Read runs, those with the latest event first.

    Args:
        paths: of run directories.
        areas: all staging areas of this user.
    """
    sizes = {area.path: area.size_bytes for area in areas}
    entries = [_read(RunDirectory(path=path), sizes) for path in paths]
    return sorted(entries, key=lambda entry: -entry.last_time)


def _read(directory: RunDirectory, sizes: Mapping[Path, int]) -> RunEntry:
    status: RunStatus | None = None
    problem: str | None = None
    areas: tuple[Path, ...] = ()
    try:
        status = RunReader(directory).read()
        areas = tuple(recorded_areas(directory.read_run()))
    except (RunDirectoryError, OSError) as error:
        problem = str(error)
    last_time = status.history.wall.last if status is not None else None
    backups = links_of(directory, status) if status is not None else []
    return RunEntry(
        directory=directory,
        status=status,
        problem=problem,
        last_time=last_time or _modified_at(directory.path),
        size_bytes=_size_bytes(directory, backups),
        memory_bytes=sum(sizes.get(area, 0) for area in areas),
        areas=areas,
        backups=tuple(backups),
    )


def links_of(directory: RunDirectory, status: RunStatus) -> list[BackupFolder]:
    """Return the links to checkpoints that the last start of a run has left."""
    return find_backups(directory.checkpoint_backups, status.run_id, status.history.calls.output_directories)


def _size_bytes(directory: RunDirectory, backups: Iterable[BackupFolder]) -> int:
    own = (tree_bytes(path, linked=path != directory.checkpoint_backups) for path in directory.own_files())
    beside = (
        tree_bytes(one.path, linked=False)
        for one in backups
        if directory.checkpoint_backups not in one.path.parents
    )
    return sum(own) + sum(beside)


def find_run(name: str | None, root: Path = DEFAULT_ROOT) -> RunDirectory:
    """Return the run that a command refers to, by its directory or its id.

    Args:
        name: a run directory or a run id, in `root` or in the registry; None for the one that is meant, see
            `meant_run`.
        root: the folder that contains runs.

    Raises:
        RunDirectoryError: there is no such run, or several.
    """
    if name is None:
        meant = meant_run(root)
        if meant is None:
            raise RunDirectoryError(f"no run under {root}/; name a run directory")
        active = [run.path for run in _launched_last_first(root) if run.owner() is not None]
        if len(active) > 1:
            raise RunDirectoryError(
                f"{len(active)} runs are active; name one of {', '.join(map(str, active))}"
            )
        return meant
    found = [path for path in (Path(name), root / name) if _is_run(path)][:1]
    if not found and "/" not in name:
        found = [path for path in registered(registry_folder()) if _is_run(path) and _has_id(path, name)]
    if not found:
        raise RunDirectoryError(f"{name} is not a run directory (no run.json in it or under {root}/)")
    if len(found) > 1:
        raise RunDirectoryError(f"{name} is the id of several runs; name one of {', '.join(map(str, found))}")
    return RunDirectory(path=found[0])


def meant_run(folder: Path) -> RunDirectory | None:
    """Return the run of a folder that is meant if none is named; None if the folder has none.

    That is the active one, launched last; without any, the last one that has trained, so not one that was
    refused.
    """
    runs = _launched_last_first(folder)
    active = next((run for run in runs if run.owner() is not None), None)
    return active or next(filter(has_trained, runs[:MAX_ASKED]), None) or next(iter(runs), None)


def _launched_last_first(folder: Path) -> list[RunDirectory]:
    files = sorted(folder.glob("*/run.json"), key=lambda file: -_modified_at(file))
    return [RunDirectory(path=file.parent) for file in files]


def has_trained(run: RunDirectory) -> bool:
    """Whether a run has taken a step, as far as it can be read."""
    try:
        history = RunReader(run).history()
    except (RunDirectoryError, OSError):
        return False
    return history.best_position > (0, 0) or history.no_trainer.seen


def _is_run(path: Path) -> bool:
    try:
        return (path / "run.json").is_file()
    except OSError:  # a directory of another user
        return False


def _has_id(path: Path, name: str) -> bool:
    try:
        return name in (path.name, RunDirectory(path=path).read_run().get("run_id"))
    except RunDirectoryError:
        return False


def _modified_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
