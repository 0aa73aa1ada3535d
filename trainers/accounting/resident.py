"""Memory of this process on the host: what it uses now, and the most that it has used.

Called by `phases.py`. Both figures take a few microseconds. Memory is not split by kind here: that takes the kernel a
walk over all pages, so the supervisor does it, outside the steps.
"""

from __future__ import annotations

import os
import resource

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ResidentMemory:
    """Reads the resident memory of the process that has created it."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """Return (resident bytes now, the most that this process has had)."""
        pages = os.pread(self._descriptor, 128, 0).split(b" ", 2)[1]
        return int(pages) * _PAGE_BYTES, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
