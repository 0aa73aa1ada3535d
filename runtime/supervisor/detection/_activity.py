"""Activity of ranks: collectives, CPU time, I/O and connections of their process trees.

A slow rank is not a hung one. A rank that issues collectives is active in any phase, and one that only
computes for a limited time; that time is shorter in generation, rewards and steps, because an endless loop
computes as well. During data loading, saving, evaluation, callbacks and the user's own code, a rank is also
active while its process tree transfers data. In every phase, a rank whose process tree does nothing at all
is quiet, and one whose interpreter does not run is frozen. Called by `_stall_detector.py`. Reads /proc; does
not judge.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace

from grpo_run.runtime.processes import usage as process_usage
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog import processes
from grpo_run.watchdog.observation import SESSION_PHASES, Slot
from grpo_run.watchdog.run_processes import connections
from grpo_run.watchdog.stalls.observed import HEARTBEAT_LATE_SECONDS, ProcessFacts
from grpo_run.watchdog.stalls.process_clocks import FrozenClock, QuietClock, TreeReading

BUSY_FRACTION = 0.05
"""Share of one core; an idle interpreter with its heartbeat uses 0.1 %, a logger beside it less than this."""
BUSY_SECONDS = 0.03
"""Three ticks of the kernel's clock, so that its resolution does not count as activity."""
MOVED_BYTES = 64 * 1024
"""Bytes between two readings; a logger writes less, a shard or a checkpoint more."""
STILL_SECONDS = 4.0
"""The tree of a rank is read once its slot has not changed for this long."""
READ_SECONDS = 2.0
"""Interval between two readings of trees, which cost a scan of /proc."""
LOOKS_PER_FLOOR = 12
"""Looks at threads and connections of a rank that may be quiet, which cost ten times as much as a reading."""
FROZEN_READ_SECONDS = 1.9
"""Time between two readings of the threads of a rank whose heartbeat is late; a proof needs several."""
STOPPED_READ_SECONDS = 4.0
"""The same while all of its threads are stopped by a signal: one that is continued has a heartbeat at once.
"""
RECENT_SECONDS = 5.0
"""A rank was active recently within this time."""
WAITING_THREADS = frozenset({"gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_workerserver"})
"""Threads of torch that wake up without working for the rank."""


class RankActivity:
    """Last activity of each rank in one attempt.

    Args:
        floor_seconds: shortest time after which a quiet rank may be hung; with a low one, trees are read more
            often.
        now: monotonic seconds; the time before it was not observed and counts for nothing.
    """

    def __init__(self, floor_seconds: float, now: float) -> None:
        self._observed_since = now
        self._floor_seconds = floor_seconds
        self._still_seconds = min(STILL_SECONDS, floor_seconds / 4)
        self._read_seconds = min(READ_SECONDS, floor_seconds / 8)
        self._look_seconds = floor_seconds / LOOKS_PER_FLOOR
        self._next_look_at = 0.0
        self._long_seconds = floor_seconds / 2
        self._next_reading_at = 0.0
        self._collectives_issued: dict[int, int] = {}
        self._usage: dict[int, tuple[float, TreeReading]] = {}
        self._active_at: dict[int, float] = {}
        self._computing_at: dict[int, float] = {}
        self._seen_at: dict[int, float] = {}
        self._quiet: dict[int, QuietClock] = {}
        self._frozen: dict[int, tuple[float, FrozenClock]] = {}
        self._outside: dict[int, tuple[float, str]] = {}
        self._connections_at = -math.inf

    def active_at(self, rank: int) -> float:
        """When the rank last issued a collective, or transferred data in a phase in which that counts.

        Monotonic seconds; 0 for never.
        """
        return self._active_at.get(rank, 0.0)

    def computing_at(self, rank: int) -> float:
        """When the rank was last seen using the CPU; 0 for never."""
        return self._computing_at.get(rank, 0.0)

    def is_busy(self, rank: int, now: float) -> bool | None:
        """Whether the rank's process tree has worked during the last seconds, in any phase; None if
        unknown.
        """
        if now - self._seen_at.get(rank, -math.inf) < RECENT_SECONDS:
            return True
        since = self._quiet.get(rank, QuietClock()).since_seconds
        return None if since is None or now - since < 2 * self._read_seconds else False

    def connected_to(self, rank: int, still: float, now: float) -> str | None:
        """Return the processes outside the job to which connections were seen while the rank did the same, or
        lately, in words; None if none was seen.

        As far as somebody has looked; see `look_at_connections`.

        Args:
            still: for how many seconds the rank's slot has not changed.
        """
        seen_at, named = self._outside.get(rank, (-math.inf, ""))
        return named if now - seen_at <= max(still, self._floor_seconds) else None

    def look_at_connections(self, pids: Mapping[int, int], now: float) -> None:
        """Read the connections of all ranks, which takes some milliseconds; not again within a second.

        Where the kernel does not tell, a rank counts as connected.
        """
        if now - self._connections_at < 1.0:
            return
        self._connections_at = now
        found = process_usage.find_process_trees(pids.values())
        self._note(_read_connections({rank: found[pid] for rank, pid in pids.items()}), now)

    def restart(self, now: float) -> None:
        """Forget what was seen of processes before `now`, after a pause."""
        self._observed_since = now
        self._usage.clear()
        self._quiet.clear()
        self._frozen.clear()

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Record the collectives issued since the last call. Cheap; called at every scan."""
        for rank, slot in slots.items():
            if slot is not None and slot.collectives_issued != self._collectives_issued.get(rank, 0):
                self._collectives_issued[rank] = slot.collectives_issued
                self._active_at[rank] = now

    def scan(
        self,
        slots: Mapping[int, Slot | None],
        pids: Mapping[int, int],
        still: Mapping[int, float],
        now: float,
    ) -> dict[int, ProcessFacts | None]:
        """Read the ranks' processes; None for a rank that cannot be read.

        Process trees are read only for ranks that have been in a phase for a while, all of them with one scan
        of /proc, and not at every call.

        Args:
            still: for how many seconds each rank's slot has not changed.
        """
        if now >= self._next_reading_at:
            self._next_reading_at = now + self._read_seconds
            self._read_trees(slots, pids, still, now)
        return {
            rank: self._facts(slot, pids.get(rank), still.get(rank, 0.0), now) for rank, slot in slots.items()
        }

    def late_heartbeats(self, slots: Mapping[int, Slot | None], now: float) -> bool:
        """Whether the interpreter of any rank has not run for some seconds."""
        return any(_heartbeat_age(slot, now) > HEARTBEAT_LATE_SECONDS for slot in slots.values())

    def _facts(self, slot: Slot | None, pid: int | None, still: float, now: float) -> ProcessFacts | None:
        state = processes.read_state(pid) if pid is not None else None
        if state is None or pid is None:
            return None
        age = _heartbeat_age(slot, now)
        quiet_seconds, connected, frozen = 0.0, None, False
        if slot is not None:
            rank = slot.rank
            frozen = self._read_frozen(rank, pid, age, state, now)
            quiet = self._quiet.get(rank, QuietClock())
            if quiet.since_seconds is not None:
                quiet_seconds, connected = min(now - quiet.since_seconds, still), quiet.connected
        return ProcessFacts(
            state=state,
            heartbeat_age_seconds=age,
            quiet_seconds=quiet_seconds,
            connected=connected,
            frozen_seconds=min(age, now - self._observed_since) if frozen else 0.0,
        )

    def _read_frozen(self, rank: int, pid: int, heartbeat_age: float, state: str, now: float) -> bool:
        """Read the threads of a rank whose heartbeat is late, and return whether its interpreter is
        frozen.
        """
        if not heartbeat_age > HEARTBEAT_LATE_SECONDS:
            self._frozen.pop(rank, None)
            return False
        read_at, clock = self._frozen.get(rank, (-math.inf, FrozenClock()))
        stopped = clock.stopped_since_seconds is not None
        if now - read_at >= (STOPPED_READ_SECONDS if stopped else FROZEN_READ_SECONDS):
            clock = clock.after(process_usage.read_threads([pid]), now)
            self._frozen[rank] = now, clock
        return clock.frozen(stopped=state == "T")

    def _read_trees(
        self,
        slots: Mapping[int, Slot | None],
        pids: Mapping[int, int],
        still: Mapping[int, float],
        now: float,
    ) -> None:
        leaders = {
            pids[rank]: rank
            for rank, slot in slots.items()
            if rank in pids
            and slot is not None
            and (
                still.get(rank, 0.0) >= self._still_seconds
                or (_session_counts(slot) and now - slot.began_seconds >= self._long_seconds)
            )
        }
        for known in (self._usage, self._quiet):
            for rank in known.keys() - leaders.values():
                del known[rank]
        if not leaders:
            return
        # also of ranks that are at work: a connection to one of them is inside the job
        found = process_usage.find_process_trees(pids.values())
        usages = {rank: process_usage.read_tree_usage(found[pid]) for pid, rank in leaders.items()}
        closer: dict[int, list[int]] = {}
        if now >= self._next_look_at:
            self._next_look_at = now + self._look_seconds
            closer = {
                rank: found[pid]
                for pid, rank in leaders.items()
                if now - (self._quiet.get(rank, QuietClock()).since_seconds or now) >= self._look_seconds
            }
        tables: dict[int, connections.Connections | None] = {}
        if closer:
            tables = _read_connections({rank: found[pid] for rank, pid in pids.items()})
            self._note({rank: tables[rank] for rank in closer}, now)
        for rank, usage in usages.items():
            slot = slots[rank]
            assert slot is not None
            self._compare(rank, slot, usage, now)
            before = self._quiet.get(rank, QuietClock())
            self._quiet[rank] = before.after(_reading(usage, closer.get(rank), tables.get(rank)), now)
            if before.since_seconds is not None and self._quiet[rank].since_seconds == now:
                self._seen_at[rank] = now

    def _note(self, found: Mapping[int, connections.Connections | None], now: float) -> None:
        for rank, one in found.items():
            if one is None or one.outside:
                self._outside[rank] = now, one.outside if one is not None else "an unknown process"

    def _compare(self, rank: int, slot: Slot, usage: TreeReading | None, now: float) -> None:
        """Compare with the last reading, and record what counts as activity in the rank's phase."""
        before = self._usage.pop(rank, None)
        if usage is None:
            return
        self._usage[rank] = now, usage
        if before is None:
            return
        since, earlier = before
        if usage.cpu_seconds - earlier.cpu_seconds > max(BUSY_SECONDS, BUSY_FRACTION * (now - since)):
            self._computing_at[rank] = now
        if _session_counts(slot) and abs(usage.io_bytes - earlier.io_bytes) >= MOVED_BYTES:
            self._active_at[rank] = now


def _read_connections(members: Mapping[int, list[int]]) -> dict[int, connections.Connections | None]:
    """Connections by rank, from the members of all ranks' trees.

    Ranks inherit from the supervisor or from its forkserver. Its other children may be orphans of a rank's
    helpers.
    """
    server = process_names.forkserver_pid()
    return connections.read_connections(members, supervisor=[os.getpid(), *([server] if server else [])])


def _reading(
    usage: TreeReading | None, closer: list[int] | None, connected: connections.Connections | None
) -> TreeReading | None:
    if usage is None:
        return None
    runnable = None
    if closer is not None:
        threads = process_usage.read_threads(closer)
        if threads is None or any(thread.state == "t" for thread in threads.values()):
            return None  # a debugger holds a thread: whoever uses it decides
        runnable = frozenset(
            number
            for number, thread in threads.items()
            if thread.state == "R" and thread.name not in WAITING_THREADS
        )
    return replace(
        usage,
        runnable=runnable,
        connected=bool(connected.outside) or connected.device if connected is not None else None,
        traffic_bytes=connected.traffic_bytes if connected is not None else None,
    )


def _session_counts(slot: Slot) -> bool:
    return slot.phase is None or slot.phase in SESSION_PHASES


def _heartbeat_age(slot: Slot | None, now: float) -> float:
    return now - slot.heartbeat_seconds if slot is not None and slot.heartbeat_seconds else math.nan
