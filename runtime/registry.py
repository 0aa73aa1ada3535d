"""The registry of run directories, and the addresses of the metrics of live runs.

    $XDG_STATE_HOME/grpo-run/runs/9f86d081884c7d65           ~/.local/state by default; one file per run
    $XDG_STATE_HOME/grpo-run/targets/9f86d081884c7d65.json   one per run whose metrics are served
    $XDG_STATE_HOME/grpo-run/serve.token                     the token of the live page

Every launch writes its entry under a name that follows from the path. The registry is an index only: an
entry without a run directory is ignored, and a run without an entry is found in `runs/`. Only its user can
read it. The targets are for Prometheus (file_sd_configs), which may run as another user. Called by
`grpo-run launch` and `catalog.py`.

Launches whose registry is elsewhere (another user or machine) are not seen. Deletes no run.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.files import replace_file

MAX_ENTRIES = 1000
"""The entries launched last are kept; the live page shows no more runs than a person can read."""
MAX_PATH_BYTES = 4096
"""PATH_MAX of Linux."""


def registry_folder() -> Path | None:
    """Return the folder of the registry; None if the user has no home directory."""
    return _state_folder("runs")


def targets_folder() -> Path | None:
    """Return the folder in which runs announce their metrics to Prometheus; None as `registry_folder`."""
    return _state_folder("targets")


def token_file() -> Path | None:
    """Return where `grpo-run serve` keeps the token of its page; None as `registry_folder`."""
    folder = registry_folder()
    return None if folder is None else folder.with_name("serve.token")


def _state_folder(name: str) -> Path | None:
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification: a relative path is ignored
        return Path(state) / "grpo-run" / name
    try:
        return Path.home() / ".local" / "state" / "grpo-run" / name
    except RuntimeError:
        return None


def register(run_directory: Path, folder: Path | None) -> bool:
    """Write the entry of a run directory, and remove the oldest entries over `MAX_ENTRIES`.

    Returns:
        whether it could be written. A home directory that cannot be written is no reason not to train.
    """
    if folder is None:
        return False
    path = os.fsencode(run_directory.resolve())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        entry = folder / _name(path)
        replace_file(entry, path)
        for old in _newest_first(folder)[MAX_ENTRIES:]:
            old.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def forget(run_directory: Path, folder: Path | None) -> None:
    """Remove the entry of a run directory, if there is one."""
    if folder is not None:
        with suppress(OSError):  # without its directory, the entry is ignored
            (folder / _name(os.fsencode(run_directory.resolve()))).unlink(missing_ok=True)


def target_file(run_directory: Path, folder: Path) -> Path:
    """Return the file that announces the metrics of a run.

    Args:
        folder: as `targets_folder` returns it.
    """
    return folder / f"{_name(os.fsencode(run_directory.resolve()))}.json"


def announce_target(run_directory: Path, folder: Path | None, *, target: str, run_id: str) -> bool:
    """Tell Prometheus where the metrics of a run are served, until `withdraw_target`.

    Files of killed launches of this machine that name the same address are removed: it is this run's now.

    Args:
        target: `host:port`, on which this process listens.

    Returns:
        whether the file could be written.
    """
    if folder is None:
        return False
    labels = {"run_id": run_id, "node": os.uname().nodename}
    content = json.dumps([{"targets": [target], "labels": labels}]).encode() + b"\n"
    own = target_file(run_directory, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = own.with_suffix(".new")  # Prometheus may read it as soon as it has its name
        replace_file(temporary, content)
        for path, mode in ((folder, 0o755), (temporary, 0o644)):
            path.chmod(mode)  # whatever the umask is
        temporary.replace(own)
        for other in folder.glob("*.json"):
            if other != own and _announces(other, target, labels["node"]):
                other.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def withdraw_target(run_directory: Path, folder: Path | None) -> None:
    """Remove the file of `announce_target`, if there is one."""
    if folder is not None:
        with suppress(OSError):  # a file that stays is removed by the next launch
            target_file(run_directory, folder).unlink(missing_ok=True)


def _announces(file: Path, target: str, node: str) -> bool:
    try:
        (group,) = json.loads(file.read_bytes())
        return bool(group["targets"] == [target] and group["labels"]["node"] == node)
    except (OSError, ValueError, TypeError, LookupError):
        return False  # not a file of ours


def registered(folder: Path | None) -> list[Path]:
    """Return the registered run directories, launched last first. They may not exist any more."""
    if folder is None:
        return []
    found = []
    for entry in _newest_first(folder)[:MAX_ENTRIES]:
        with suppress(OSError):
            with open(entry, "rb") as file:
                path = file.read(MAX_PATH_BYTES)
            if path.startswith(b"/") and _name(path) == entry.name:
                found.append(Path(os.fsdecode(path)))
    return found


def _name(path: bytes) -> str:
    return hashlib.sha256(path).hexdigest()[:16]


def _newest_first(folder: Path) -> list[Path]:
    try:
        entries = [(entry.stat().st_mtime_ns, entry.name) for entry in os.scandir(folder)]
    except OSError:
        return []
    return [folder / name for _, name in sorted(entries, reverse=True) if not name.startswith(".")]
