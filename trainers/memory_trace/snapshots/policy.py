"""When a snapshot of the allocator is saved, in which file, and how it is kept within a bound. Pure.

Used by `history.py`. An attempt saves three at most: at the first finding, when memory runs out for the first time, and at the end of
the script. The last of these replaces the first, of which it shows everything that is still alive.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any

MOST_ENTRIES = 50_000
"""Entries of the ring buffer, for each device: some dozens of steps of a small model, and one or a few of a large one."""
MOST_BYTES = 64 << 20
"""Size of a file. torch expects several KB for an entry with its stacks, most of which are shared in the file."""
PROTOCOL = 4
"""Of pickle: the default of the Pythons that PyTorch's viewer was written for."""


class Reason(str, Enum):
    """Why a snapshot is saved. The values appear in the journal."""

    finding = "finding"
    out_of_memory = "out of memory"
    end = "end of the script"

    def __str__(self) -> str:
        return self.value


class SnapshotPolicy:
    """Which snapshots of an attempt are saved: one for each reason."""

    def __init__(self) -> None:
        self._saved: set[Reason] = set()

    def takes(self, reason: Reason) -> bool:
        """Whether a snapshot is saved now; if so, none for the same reason is saved again."""
        if reason in self._saved:
            return False
        self._saved.add(reason)
        return True


def file_name(rank: int, reason: Reason) -> str:
    """Return the name of a rank's file. Running out of memory has one of its own, which nothing else replaces."""
    return f"rank-{rank}-out-of-memory.pickle" if reason is Reason.out_of_memory else f"rank-{rank}.pickle"


class TooLarge(Exception):
    """The blocks alone, without history, are larger than the bound."""


def pickled_within(snapshot: dict[str, Any], most_bytes: int) -> tuple[bytes, int]:
    """Return a snapshot as a file's content, with as much of the newest history as fits, and the number of its entries.

    Args:
        snapshot: of the allocator; its history is in `device_traces`, one list for each device, oldest first.
        most_bytes: that the content may have.

    Raises:
        TooLarge: it does not fit without any history either.
    """
    traces = snapshot.get("device_traces", [])
    longest = max(map(len, traces), default=0)
    while True:
        shortened = {
            **snapshot,
            "device_traces": [
                trace[len(trace) - longest :] if len(trace) > longest else trace for trace in traces
            ],
        }
        content = _pickled(shortened, most_bytes)
        if content is not None:
            return content, sum(map(len, shortened["device_traces"]))
        if longest == 0:
            raise TooLarge
        longest //= 2


class _Full(Exception):
    pass


class _Bounded(io.BytesIO):
    """A buffer that takes a number of bytes and no more."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self._most = most_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._most:
            raise _Full
        return super().write(data)


def _pickled(value: Any, most_bytes: int) -> bytes | None:
    buffer = _Bounded(most_bytes)
    try:
        pickle.dump(value, buffer, protocol=PROTOCOL)
    except _Full:
        return None
    return buffer.getvalue()
