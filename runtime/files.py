"""File helpers shared by every layer of the runtime: atomic JSON files, directory fsync, errnos for a full disk.

Imports nothing of this project. Does not know the run directory or checkpoints; callers pass paths.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
"""Errors of a write that does not fit: disk full, quota reached, file size limit, no memory (tmpfs)."""

SHARED_MEMORY_ROOT = Path("/dev/shm")
"""The tmpfs that shm_overview(7) says every Linux system mounts. Files in it outlive processes, not a reboot."""


def write_json(path: Path, value: Any, *, indent: int | None = 2, durable: bool = True) -> None:
    """Replace a file by JSON text, atomically and with mode 0600.

    Readers see the old content or the new content, never a part. The text is ASCII, because command-line arguments
    may contain lone surrogates, which UTF-8 cannot encode.

    Args:
        indent: spaces per level; None writes one line.
        durable: fsync the file before the rename and its directory after it.

    Raises:
        OSError: the file cannot be written; the old content is unchanged and the temporary file is removed.
        TypeError: `value` is not JSON; nothing is written.
    """
    text = json.dumps(value, indent=indent) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that renames and new names in it survive a crash of the machine.

    File systems that do not support fsync of a directory are accepted as they are.

    Raises:
        OSError: the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
