"""Find the runs of a user: all, the one that a command names, or the one that is meant if none is named.

A run is found in `runs/` of the working directory or by the registry, and nowhere else: no file system is
searched. Called by every command that names a run, and by the live page. Reads only.
"""

from __future__ import annotations

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
