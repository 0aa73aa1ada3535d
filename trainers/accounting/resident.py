"""Memory of this process on the host: what it uses now, and the most that it has used.

Called by `phases.py`. Both figures take a few microseconds. Memory is not split by kind here: that takes the kernel a
walk over all pages, so the supervisor does it, outside the steps.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class HostReading(NamedTuple):
    """Memory of one process on the host, in bytes."""

    resident: int
    anonymous: int
    """Without shared memory, such as snapshots, and without mapped files."""
    most_resident: int
    """The most that was resident at any time."""


class ResidentMemory:
    """Reads the resident memory of the process that has created it."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> HostReading:
        """Return the figures of now."""
        _, resident, shared, _ = os.pread(self._descriptor, 128, 0).split(b" ", 3)
        pages = int(resident)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return HostReading(pages * _PAGE_BYTES, (pages - int(shared)) * _PAGE_BYTES, most)
