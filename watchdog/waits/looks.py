"""One sample of a rank: its processes, their threads, and what each thread waits for.

Plain data. Filled by `runtime.supervisor.detection`, judged by `proof.py`. What could not be read is
`unknown`, and never stands for "nothing".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class WaitKind(str, Enum):
    """What can end a wait."""

    futex = "futex"  # another thread of the same process
    descriptors = "descriptors"  # whoever is at the other end of a pipe or connection
    child = "child"  # the end of a child process
    sleep = "sleep"  # a known time of the monotonic clock
    timed = "timed"  # a time limit whose end is not known
    accept = "accept"  # a process that connects
    stopped = "stopped"  # a signal, as the thread was stopped by one
    ended = "ended"  # nothing: the thread has exited
    unknown = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """What one thread waits for.

    `call` is the name of the system call. `child` is the process id waited for, 0 for any child.
    `until_seconds` is on the monotonic clock. `timeout_seconds` is infinite without a limit, and NaN if it
    was not read.
    """

    kind: WaitKind
    call: str = ""
    child: int = 0
    until_seconds: float = math.inf
    timeout_seconds: float = math.inf


UNKNOWN = Wait(kind=WaitKind.unknown)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingThread:
    """One thread at one moment.

    `name` is the kernel's, at most 15 characters. `switches` counts how often it was scheduled: two equal
    looks at a waiting thread mean that it did not run in between. `registers` (the system call's arguments
    and stack pointer) tell one call from another.
    """

    tid: int
    name: str
    state: str
    switches: int
    wait: Wait
    registers: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process at one moment.

    `threads` is None if they could not be read. `caught_signals` are the numbers of the signals that it
    handles. `has_timers` says that it has POSIX timers, or that this is unknown. `helper` marks a known
    helper (multiprocessing's resource tracker) that neither sends signals to the rank nor exits before it.
    """

    pid: int
    parent: int
    threads: tuple[WaitingThread, ...] | None
    caught_signals: frozenset[int] = frozenset()
    has_timers: bool = False
    helper: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLook:
    """A rank's process (`pid`) and all its descendants.

    `idle_threads` are threads of the rank of which it is known that they wake no other thread.
    """

    pid: int
    processes: Mapping[int, Process]
    idle_threads: frozenset[int] = frozenset()

    @property
    def main_thread(self) -> WaitingThread | None:
        """The rank's main thread; None if it could not be read."""
        process = self.processes.get(self.pid)
        threads = process.threads if process is not None else None
        return next((thread for thread in threads or () if thread.tid == self.pid), None)
