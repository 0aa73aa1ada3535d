"""The identity of this process's view of the file system: its mount namespace and root directory.

Containers that share /dev/shm (`--ipc=host`) see different files under one path. Whether a path in a record
names the same file here can only be told if the record was written with the same view. Called by `owner.py`
and `leftovers.py`.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from grpo_run.runtime.files import BOOT_ID
from grpo_run.watchdog.processes import read_stat

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
