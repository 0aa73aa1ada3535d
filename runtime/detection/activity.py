"""Signs of life of ranks that say nothing: collectives they issue, processor time and bytes of their sessions.

Slow is not hung. A rank that issues collectives gets on, whatever phase it is in; one that loads data, saves,
evaluates or runs the user's own code gets on while its session computes, reads or writes. Generation, rewards and steps
are not given that: a regular expression that never ends computes too. Asked by the watch while a phase is long.
Reads /proc; judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from grpo_run.watchdog import processes
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.detection import ProcessFacts

OPEN_ENDED = frozenset({Phase.startup, Phase.data, Phase.checkpoint, Phase.eval, Phase.idle})
"""Phases in which the work is somebody else's, and shows only from outside."""
BUSY_FRACTION = 0.05
"""Of one core: more than an idle interpreter and its beat (0.1 %), or a logger beside it, use."""
BUSY_SECONDS = 0.03
"""Three ticks of the kernel's clock: less is its grain."""
MOVED_BYTES = 64 * 1024
"""Between two looks: what a logger writes in between is less, a shard or a checkpoint more."""


class Activity:
    """What each rank was last seen to do. One an attempt."""

    def __init__(self) -> None:
        self._notes: dict[int, int] = {}
        self._usage: dict[int, tuple[float, float, int]] = {}
        self._alive_at: dict[int, float] = {}

    def alive_at(self, rank: int) -> float:
        """When the rank was last seen to get on, monotonic seconds; 0 for never."""
        return self._alive_at.get(rank, 0.0)

    def note(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Take a look at the slots into account; cheap, for every look."""
        for rank, slot in slots.items():
            if slot is not None and slot.notes != self._notes.get(rank, 0):
                self._notes[rank] = slot.notes
                self._alive_at[rank] = now

    def look(
        self, slots: Mapping[int, Slot | None], pids: Mapping[int, int], now: float
    ) -> dict[int, ProcessFacts | None]:
        """Look at the ranks' processes too; None for one that cannot be read.

        Sessions are read only where their work counts, and all at the price of one look around.
        """
        asked = {pids[rank] for rank, slot in slots.items() if rank in pids and _open_ended(slot)}
        members = processes.members_by_session(asked) if asked else {}
        return {
            rank: self._look(rank, slot, pids.get(rank), members.get(pids.get(rank, -1)), now)
            for rank, slot in slots.items()
        }

    def _look(
        self, rank: int, slot: Slot | None, pid: int | None, members: list[int] | None, now: float
    ) -> ProcessFacts | None:
        thread = processes.read_main_thread(pid) if pid is not None else None
        if thread is None or pid is None:
            return None
        age = now - slot.beat_seconds if slot is not None and slot.beat_seconds else math.nan
        facts = ProcessFacts(
            state=thread.state, cpu_seconds=thread.cpu_seconds, io_bytes=0, beat_age_seconds=age
        )
        usage = processes.read_session(pid, members) if members is not None else None
        if usage is None:
            return facts
        io_bytes = usage.io_bytes or 0
        before, self._usage[rank] = self._usage.get(rank), (now, usage.cpu_seconds, io_bytes)
        if before is not None:
            since, cpu_seconds, then = before
            busy = usage.cpu_seconds - cpu_seconds > max(BUSY_SECONDS, BUSY_FRACTION * (now - since))
            if busy or abs(io_bytes - then) >= MOVED_BYTES:
                self._alive_at[rank] = now
        return replace(facts, cpu_seconds=usage.cpu_seconds, io_bytes=io_bytes)


def _open_ended(slot: Slot | None) -> bool:
    return slot is not None and (slot.phase is None or slot.phase in OPEN_ENDED)
