"""Which run owns a staging area: its folder, its record and its lock.

    /dev/shm/grpo-run-1000/           mode 0700, of this user
      9f86d081884c7d65/               the staging area of one run (`area.py`), with `OWNER.json` and a lock

The supervisor holds the lock, which the kernel releases when it dies. `run.json` holds the path of the
area. The name is random, because another container may have the same path and command, and every supervisor
renames the area: a copy of the run directory, or one that was used on another machine meanwhile, does not
find snapshots that are not its own. Containers that share /dev/shm (`--ipc=host`) see different files under
one path, so a record also holds the mount namespace and root directory of its writer.

Called by `runtime/launching/` under the lock of the run directory, and when the command line is
checked. Deletes no area of another run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from grpo_run.runtime.files import BOOT_ID, lock_file, write_json
from grpo_run.watchdog.processes import read_stat

MAX_FOLDERS = 9
"""How many names are tried. A name is taken if another user, or root of another container, has it."""


def private_folder(root: Path) -> Path | None:
    """Return this user's folder, created if it does not exist; None if there can be none.

    The root is world-writable: a folder that another user owns or can access is not trusted, and the next
    name is used.

    Args:
        root: where the memory-backed file system is mounted.
    """
    for folder in _names(root):
        try:
            folder.mkdir(exist_ok=True, mode=0o700)
        except FileExistsError:
            continue  # a file or a link
        except OSError:
            return None
        if _is_private(folder):
            return folder
    return None


def new_area_path(folder: Path) -> Path:
    """Return a path for a new area that nothing else has."""
    return folder / secrets.token_hex(8)


def _names(root: Path) -> Iterator[Path]:
    yield root / f"grpo-run-{os.getuid()}"
    for number in range(2, MAX_FOLDERS + 1):
        yield root / f"grpo-run-{os.getuid()}.{number}"


def _is_private(folder: Path) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077


NAMESPACE = Path("/proc/self/ns/mnt")
GET_NAMESPACE_ID = 0x8008B705
"""NS_GET_MNTNS_ID of linux/nsfs.h, Linux 6.11: a number that is never used again. The inode number of a
namespace may be."""


def mount_namespace() -> str | None:
    """Return a text that is equal only for processes that see the same files under the same paths.

    The reverse does not hold: two processes with the same files may get different texts.

    Returns:
        None if the kernel does not tell; never treat two unknown views as the same.
    """
    try:
        root = os.stat("/")
        boot = BOOT_ID.read_text().strip()
        name = os.readlink(NAMESPACE)
        unique = _unique_number() or _start_of_first_process()
    except (OSError, ValueError):
        return None
    return f"{boot}/{name}/{unique}/{root.st_dev}:{root.st_ino}"


def _unique_number() -> str | None:
    """Return the namespace's number, or None on an older kernel."""
    descriptor = os.open(NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        number = fcntl.ioctl(descriptor, GET_NAMESPACE_ID, b"\0" * 8)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return str(struct.unpack("=Q", number)[0])


def _start_of_first_process() -> str:
    """Return when process 1 has started, which differs between containers that had the same inode number.

    Raises:
        ValueError: it cannot be read.
    """
    first = read_stat(1)
    if first is None:
        raise ValueError("process 1 cannot be read")
    return f"1@{first.started_ticks}"


OWNER = "OWNER.json"
LOCK = "lock"
EARLIER = "earlier_snapshot_directory"
"""Key in `run.json`: the area's name under the supervisor before, beside `snapshot_directory`."""
LOCK_WAIT_SECONDS = 2.0
"""How long to wait for the lock of a supervisor that was killed: a child of it may hold it for a moment."""


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
        run_id=run_id, run_directory=str(run_directory.resolve()), mount_namespace=mount_namespace()
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
        the descriptor that holds the lock; None if another process holds it, or the area does not exist any
        more.
    """
    try:
        descriptor = os.open(area / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    if lock_file(descriptor, wait_seconds) and os.fstat(descriptor).st_nlink:
        return descriptor
    os.close(descriptor)
    return None


@dataclass(frozen=True, kw_only=True)
class LockedArea:
    """An area of this run, and the descriptor that holds its lock. The caller closes it."""

    path: Path
    lock: int


def find_area(recorded: Sequence[Path], owner: AreaOwner) -> LockedArea | None:
    """Lock and return the first recorded area that exists and is this run's; None if there is none.

    Args:
        recorded: the paths in `run.json`, newest first.
        owner: this run.
    """
    for path in recorded:
        known = read_owner(path)
        if known is None or _is_of_the_original(path, known, owner):
            continue
        lock = lock_area(path, LOCK_WAIT_SECONDS)
        if lock is not None:
            return LockedArea(path=path, lock=lock)
    return None


def _is_of_the_original(area: Path, known: AreaOwner, owner: AreaOwner) -> bool:
    """Whether this run directory is a copy of another one that still exists and needs the area."""
    if not known.path_is_valid_here or known.run_directory == owner.run_directory:
        return False
    try:
        return needs_area(known.directory, area)
    except (OSError, ValueError, TypeError):
        return False  # moved here


def take_area(
    folder: Path, found: LockedArea | None, owner: AreaOwner, record: Callable[[Path, Path | None], None]
) -> LockedArea:
    """Return the run's locked area in `folder`: the one found, under a new name, or a new one.

    Args:
        folder: this user's folder in memory (`private_folder`).
        found: the result of `find_area`; it must be in `folder`.
        owner: this run.
        record: called with the new path and the path of `found` before anything is renamed; writes both to
            `run.json`, so that a supervisor that is killed at any moment leaves an area that can be found.

    Raises:
        OSError: the area cannot be created.
    """
    path = new_area_path(folder)
    record(path, found.path if found is not None else None)
    if found is not None:
        os.rename(found.path, path)
        lock = found.lock
    else:
        path.mkdir(mode=0o700)
        new = lock_area(path)
        if new is None:
            raise OSError(errno.EBUSY, "the new staging area cannot be locked", str(path))
        lock = new
    write_owner(path, owner)
    _remove_earlier(path, owner)
    return LockedArea(path=path, lock=lock)


def _remove_earlier(present: Path, owner: AreaOwner) -> None:
    """Remove areas that this run left here before it continued on another machine.

    The caller holds the lock of the run directory, so an area of the same directory is not another run's.
    """
    for path in present.parent.iterdir():
        known = read_owner(path) if path != present else None
        if known is None or not known.path_is_valid_here or known.run_directory != owner.run_directory:
            continue
        lock = lock_area(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
