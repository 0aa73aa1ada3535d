"""Find the runs of a user: all, the one that a command names, or the one that is meant if none is named.

A run is found in `runs/` of the working directory or by the registry, and nowhere else: no file system is
searched. Called by every command that names a run, and by the live page. Reads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.registry import registered, registry_folder

MAX_ASKED = 16
"""How many of the last launches are asked whether they have trained: a long journal takes a second."""


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


def find_run(name: str | None, root: Path = DEFAULT_ROOT) -> RunDirectory:
    """Return the run that a command refers to: by its directory or id, or by what only its id begins with.

    Args:
        name: a run directory or a run id, in `root` or in the registry; None for the one that is meant, see
            `meant_run`: in `root`, or the active one of the registry if `root` has no runs.
        root: the folder that contains runs.

    Raises:
        RunDirectoryError: there is no such run, or several.
    """
    if name is None:
        launched = _launched_last_first(root) or [RunDirectory(path=path) for path in run_directories(root)]
        active = [run.path for run in launched if run.owner() is not None]
        if len(active) > 1:
            raise _several(f"{len(active)} runs are active", active)
        meant = RunDirectory(path=active[0]) if active else meant_run(root)
        if meant is None:
            raise RunDirectoryError(f"no run under {root}/; name a run directory")
        return meant
    found = [path for path in (Path(name), root / name) if name and _is_run(path)][:1]
    if not found and name and "/" not in name:
        known = run_directories(root)
        found = [path for path in known if _has_id(path, name)]
        begun = [] if found else [path for path in known if path.name.startswith(name)]
        if len(begun) > 1:
            raise _several(f"{name} begins the ids of {len(begun)} runs", begun)
        found = found or begun
    if not found:
        raise RunDirectoryError(f"{name} is not a run directory (no run.json in it or under {root}/)")
    if len(found) > 1:
        raise _several(f"{name} is the id of several runs", found)
    return RunDirectory(path=found[0])


def _several(what: str, paths: Sequence[Path]) -> RunDirectoryError:
    return RunDirectoryError(f"{what}; name one of {', '.join(map(str, paths))}")


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
