"""Activity of ranks inside long phases: collectives that they issue, and CPU time and I/O of their sessions.

A slow rank is not a hung one. A rank that issues collectives is active in any phase. During data loading,
saving, evaluation and the user's own code, a rank is also active while its session computes, reads or writes.
This does not hold for generation, rewards and steps: an endless regular expression computes as well. Called
by `stall_detector.py`. Reads /proc; does not judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from grpo_run.watchdog import processes
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.stall import ProcessFacts

SESSION_PHASES = frozenset({Phase.startup, Phase.data, Phase.checkpoint, Phase.eval, Phase.idle})
"""Phases in which CPU time and I/O of the session count as activity: other code or other processes do the
work."""
BUSY_FRACTION = 0.05
"""Share of one core; an idle interpreter with its heartbeat uses 0.1 %, a logger beside it less than this."""
BUSY_SECONDS = 0.03
"""Three ticks of the kernel's clock, so that its resolution does not count as activity."""
MOVED_BYTES = 64 * 1024
"""Bytes between two checks; a logger writes less, a shard or a checkpoint more."""


class RankActivity:
    """Last activity of each rank in one attempt."""

    def __init__(self) -> None:
        self._collectives_issued: dict[int, int] = {}
        self._usage: dict[int, tuple[float, float, int]] = {}
        self._active_at: dict[int, float] = {}

    def active_at(self, rank: int) -> float:
        """When the rank was last seen active, in monotonic seconds; 0 for never."""
        return self._active_at.get(rank, 0.0)

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Record the collectives issued since the last call. Cheap; called at every scan."""
        for rank, slot in slots.items():
            if slot is not None and slot.collectives_issued != self._collectives_issued.get(rank, 0):
                self._collectives_issued[rank] = slot.collectives_issued
                self._active_at[rank] = now

    def scan(
        self, slots: Mapping[int, Slot | None], pids: Mapping[int, int], now: float
    ) -> dict[int, ProcessFacts | None]:
        """Read the ranks' processes; None for a rank that cannot be read.

        Sessions are read only for ranks in `SESSION_PHASES`, all of them with one scan of /proc.
        """
        leaders = {pids[rank] for rank, slot in slots.items() if rank in pids and _session_counts(slot)}
        members = processes.members_by_session(leaders) if leaders else {}
        return {
            rank: self._scan_rank(rank, slot, pids.get(rank), members.get(pids.get(rank, -1)), now)
            for rank, slot in slots.items()
        }

    def _scan_rank(
        self, rank: int, slot: Slot | None, pid: int | None, members: list[int] | None, now: float
    ) -> ProcessFacts | None:
        thread = processes.read_main_thread(pid) if pid is not None else None
        if thread is None or pid is None:
            return None
        age = now - slot.heartbeat_seconds if slot is not None and slot.heartbeat_seconds else math.nan
        facts = ProcessFacts(
            state=thread.state, cpu_seconds=thread.cpu_seconds, io_bytes=0, heartbeat_age_seconds=age
        )
        usage = processes.read_session(pid, members) if members is not None else None
        if usage is None:
            return facts
        io_bytes = usage.io_bytes or 0
        before, self._usage[rank] = self._usage.get(rank), (now, usage.cpu_seconds, io_bytes)
        if before is not None:
            since, cpu_seconds_before, io_bytes_before = before
            busy = usage.cpu_seconds - cpu_seconds_before > max(BUSY_SECONDS, BUSY_FRACTION * (now - since))
            if busy or abs(io_bytes - io_bytes_before) >= MOVED_BYTES:
                self._active_at[rank] = now
        return replace(facts, cpu_seconds=usage.cpu_seconds, io_bytes=io_bytes)


def _session_counts(slot: Slot | None) -> bool:
    return slot is not None and (slot.phase is None or slot.phase in SESSION_PHASES)
