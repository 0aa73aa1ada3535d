"""`grpo-run` in a mount namespace of its own, where a directory lies at a path that other containers have
too.

python -P tests/support/container_launch.py PRIVATE_DIRECTORY COMMON_PATH launch …
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


def enter(private: str, common: str) -> None:
    """Bind `private` to `common` for this process and its children, and change to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None),
        lambda: libc.mount(os.fsencode(private), os.fsencode(common), None, ctypes.c_ulong(MS_BIND), None),
    )
    for call in calls:
        if call() != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    os.chdir(common)


if __name__ == "__main__":
    enter(sys.argv[1], sys.argv[2])
    del sys.argv[1:3]
    from grpo_run.cli.main import main

    sys.exit(main())
