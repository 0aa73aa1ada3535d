"""The owner of a staging area: its record, `OWNER.json`, and its lock, which the run's supervisor holds.

The kernel releases the lock when the supervisor dies. Called by `acquisition.py` and `leftovers.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pydantic

from grpo_run.runtime.files import lock_exclusively, write_json
from grpo_run.runtime.staging.ownership.mount_namespace import mount_namespace

OWNER = "OWNER.json"
LOCK = "lock"
EARLIER = "earlier_snapshot_directory"
"""Key in `run.json`: the area's name under the supervisor before, beside `snapshot_directory`."""
LOCK_WAIT_SECONDS = 2.0
"""How long to wait for a command that holds the lock only to look at the area."""


class AreaOwner(pydantic.BaseModel):
    """The contents of `OWNER.json`.

    Attributes:
        run_id: of the run.
        run_directory: its absolute path, as the supervisor saw it.
        mount_namespace: in which the path is valid; None if not known.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    run_id: str
    run_directory: str
    mount_namespace: str | None

    @property
    def path_is_valid_here(self) -> bool:
        """Whether `run_directory` names the same directory in this process."""
        return self.mount_namespace is not None and self.mount_namespace == mount_namespace()

    @property
    def directory(self) -> Path:
        """The run directory. Meaningless unless `path_is_valid_here`."""
        return Path(self.run_directory)


def describe_owner(run_id: str, run_directory: Path) -> AreaOwner:
    """Return the record of a run."""
    return AreaOwner(
        run_id=run_id,
        run_directory=str(run_directory.resolve()),
        mount_namespace=mount_namespace(),
    )


def write_owner(area: Path, owner: AreaOwner) -> None:
    """Write the record. Raises OSError."""
    write_json(area / OWNER, owner.model_dump())


def read_owner(area: Path) -> AreaOwner | None:
    """Return the record; None if there is none, or it is of an earlier release."""
    try:
        return AreaOwner.model_validate_json((area / OWNER).read_bytes())
    except (OSError, pydantic.ValidationError):
        return None


def recorded_areas(run: dict[str, Any]) -> list[Path]:
    """Return the areas that the contents of a `run.json` name, newest first."""
    values = (run.get("snapshot_directory"), run.get(EARLIER))
    return [Path(value) for value in values if isinstance(value, str)]


def needs_area(run_directory: Path, area: Path) -> bool:
    """Return whether the run in a directory would resume from this area.

    Raises:
        OSError: `run.json` cannot be read. ValueError, TypeError: it is invalid.
    """
    run = json.loads((run_directory / "run.json").read_bytes())
    if not isinstance(run, dict):
        raise TypeError("not a JSON object")
    return area in recorded_areas(run)


def lock_area(area: Path, wait_seconds: float = 0.0) -> int | None:
    """Lock an area.

    Returns:
        the descriptor that holds the lock; None if another process holds it, or the area does not exist any more.
    """
    try:
        descriptor = os.open(area / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    if lock_exclusively(descriptor, wait_seconds) and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None
