"""Clocks of a rank's processes: how long they have been idle, and how long the interpreter has not run.

`QuietClock.after` takes one reading of a rank's process tree after another, `FrozenClock.after` one of its
threads while the heartbeat is late. Called by `runtime.supervisor.detection.activity`, which reads them.
Pure. Does not decide how long is too long (`deadlines.py`), nor whether a rank that does nothing is hung
(`stall.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TOLERATED_CPU_FRACTION = 0.01
"""Share of one core that an idle rank may use: heartbeat, Gloo's loops and the threads of loggers wake up."""
TOLERATED_CPU_SECONDS = 0.05
"""Five ticks of the kernel's clock, so that its resolution does not count as work."""
TOLERATED_BYTES = 64 * 1024
"""I/O, and traffic of sockets, that an idle rank may cause: a logger writes less, a shard or a response more.
"""
OFTEN_RUNNABLE_FRACTION = 0.25
"""A thread that is runnable in this share of the looks works, or would if it got a CPU."""
OFTEN_RUNNABLE_LOOKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeReading:
    """One reading of a rank's process tree: its session and all descendants.

    `cpu_seconds` includes children that have exited. `io_bytes` and `traffic_bytes` (of TCP sockets) are sums
    over the members. `runnable` are the ids of threads that run or wait for a CPU. `connected`: a connection
    to a process outside the job, or a device, is open. These three are None if this reading did not look.
    """

    members: frozenset[int]
    cpu_seconds: float
    io_bytes: int
    runnable: frozenset[int] | None = None
    connected: bool | None = None
    traffic_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuietClock:
    """When a process tree last did something, as far as it was observed. The empty clock knows nothing.

    `since_seconds` is when it was last active, in monotonic seconds; None if unknown. `connected`: whether a
    connection to outside was seen since then; None if nobody looked.
    """

    since_seconds: float | None = None
    connected: bool | None = None
    began: TreeReading | None = None
    began_traffic_bytes: int | None = None
    looks: int = 0
    runnable: Mapping[int, int] = field(default_factory=dict)

    def after(self, reading: TreeReading | None, now: float) -> QuietClock:
        """Return the clock after a reading at `now` (monotonic seconds); None for one that failed."""
        if reading is None:
            return QuietClock()
        if self.began is None or self.since_seconds is None or self._was_active(self.began, reading, now):
            return QuietClock(
                since_seconds=now,
                connected=reading.connected,
                began=reading,
                began_traffic_bytes=reading.traffic_bytes,
                looks=int(reading.runnable is not None),
                runnable=dict.fromkeys(reading.runnable or (), 1),
            )
        counts = dict(self.runnable)
        for thread in reading.runnable or ():
            counts[thread] = counts.get(thread, 0) + 1
        connected = self.connected
        if reading.connected is not None:
            connected = reading.connected or bool(connected)
        began_traffic = self.began_traffic_bytes
        return replace(
            self,
            connected=connected,
            began_traffic_bytes=reading.traffic_bytes if began_traffic is None else began_traffic,
            looks=self.looks + (reading.runnable is not None),
            runnable=counts,
        )

    def _was_active(self, began: TreeReading, reading: TreeReading, now: float) -> bool:
        assert self.since_seconds is not None
        used = reading.cpu_seconds - began.cpu_seconds
        moved = abs(reading.io_bytes - began.io_bytes)
        if reading.traffic_bytes is not None and self.began_traffic_bytes is not None:
            moved = max(moved, abs(reading.traffic_bytes - self.began_traffic_bytes))
        tolerated = TOLERATED_CPU_SECONDS + TOLERATED_CPU_FRACTION * (now - self.since_seconds)
        often = max(OFTEN_RUNNABLE_LOOKS, OFTEN_RUNNABLE_FRACTION * (self.looks + 1))
        starved = any(self.runnable.get(thread, 0) + 1 >= often for thread in reading.runnable or ())
        return reading.members != began.members or used > tolerated or moved > TOLERATED_BYTES or starved


BUSY_FRACTION = 0.5
"""Share of one core from which a thread counts as running."""
SHARED_FRACTION = 0.1
"""The same for a thread that is always runnable and shares its core with other processes. A heartbeat of the
same priority would have run many times.
"""
ALWAYS_RUNNABLE_FRACTION = 0.8
LEAST_READINGS = 5


@dataclass(frozen=True, slots=True)
class ThreadReading:
    """State of one thread (a letter of proc(5)), its CPU time so far in seconds, and its name."""

    state: str
    cpu_seconds: float
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenClock:
    """What was seen of a rank's threads since its heartbeat became late. The empty clock has seen nothing.

    A machine that is short of CPUs delays the heartbeat too. There the threads get little CPU time, and
    nothing is concluded.
    """

    began_seconds: float | None = None
    began_cpu_seconds: Mapping[int, float] = field(default_factory=dict)
    stopped_since_seconds: float | None = None
    readings: int = 0
    runnable: Mapping[int, int] = field(default_factory=dict)
    busy: bool = False

    def after(self, threads: Mapping[int, ThreadReading] | None, now: float) -> FrozenClock:
        """Return the clock after a reading at `now` (monotonic seconds).

        Args:
            threads: every thread of the rank's process by id; None or empty if they could not be read.
        """
        if not threads:
            return FrozenClock()
        all_stopped = all(thread.state == "T" for thread in threads.values())
        stopped_since = self.stopped_since_seconds
        stopped_since = (now if stopped_since is None else stopped_since) if all_stopped else None
        if self.began_seconds is None:
            return FrozenClock(
                began_seconds=now,
                began_cpu_seconds={number: thread.cpu_seconds for number, thread in threads.items()},
                stopped_since_seconds=stopped_since,
            )
        runnable = {
            number: self.runnable.get(number, 0) + (thread.state == "R") for number, thread in threads.items()
        }
        readings = self.readings + 1
        elapsed = now - self.began_seconds
        busy = readings >= LEAST_READINGS and any(
            _runs(
                (thread.cpu_seconds - self.began_cpu_seconds.get(number, thread.cpu_seconds)) / elapsed,
                runnable[number] / readings,
            )
            for number, thread in threads.items()
        )
        return replace(
            self, stopped_since_seconds=stopped_since, readings=readings, runnable=runnable, busy=busy
        )

    def frozen(self, *, stopped: bool) -> bool:
        """Whether the interpreter is stopped, or kept from running by one of its own threads."""
        return self.stopped_since_seconds is not None if stopped else self.busy


def _runs(cpu_fraction: float, runnable_fraction: float) -> bool:
    if cpu_fraction >= BUSY_FRACTION:
        return True
    return cpu_fraction >= SHARED_FRACTION and runnable_fraction >= ALWAYS_RUNNABLE_FRACTION
