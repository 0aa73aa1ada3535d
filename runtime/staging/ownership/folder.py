"""Folders of a user on a memory-backed file system, which hold the staging areas of all runs of that user.

    /dev/shm/grpo-run-1000/           mode 0700, of this user
      9f86d081884c7d65/               the staging area of one run (`runtime.staging.area`)

The name of an area is random: nothing about it can be derived from a path or a command, which another
container may have too. Called when the command line is checked, and by `leftovers.py`.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

MAX_FOLDERS = 9
"""How many names are tried. A name is taken if another user, or root of another container, has it."""
AREA_NAME = re.compile(r"[0-9a-f]{16}")


def private_folder(root: Path) -> Path | None:
    """Return this user's folder, created if it does not exist; None if there can be none.

    The root is world-writable: a folder that another user owns or can access is not trusted, and the next name is
    used.

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


def private_folders(root: Path) -> list[Path]:
    """Return the existing folders of this user."""
    return [folder for folder in _names(root) if _is_private(folder)]


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
