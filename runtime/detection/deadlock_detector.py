"""Deadlock detection: polls the Flight Recorders while ranks stand still, and asks for a proof.

A rank is polled only if its slot has not changed for 0.3 s and it may be in a collective. The second poll
follows after 0.1 s, later ones at growing intervals. Two unchanged polls are passed to
`watchdog.deadlocks.proof`. Called by `detector.py` at every scan. Does not decide what proves a deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.runtime.detection.collective_records import CollectiveRecords, Recorded
from grpo_run.runtime.detection.finding import Finding
from grpo_run.runtime.detection.local_ranks import LocalRanks
from grpo_run.runtime.detection.slot_movement import SlotMovement
from grpo_run.watchdog import processes
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.observation import Slot

STILL_SECONDS = 0.3
"""A rank in a collective is polled once its slot has not changed for this long."""
SECOND_POLL_SECONDS = 0.1
SLOWEST_POLL_SECONDS = 5.0
IDLE_CPU_SECONDS = 0.011
"""CPU time of an idle thread between two polls: one 10 ms tick is the resolution of the kernel's clock."""


@dataclass(kw_only=True)
class Poll:
    """What one poll saw.

    `movement` are the signatures of the slots; two equal polls are the input of a proof.
    """

    movement: tuple[object, ...]
    recorded: Recorded
    main_threads: dict[int, processes.MainThread | None]


class DeadlockDetector:
    """Deadlock detector of one attempt. `suspicion` describes a deadlock that one more poll will confirm."""

    def __init__(self, ranks: LocalRanks, movement: SlotMovement, records: CollectiveRecords) -> None:
        self._ranks = ranks
        self._movement = movement
        self._records = records
        self._next_poll_at = 0.0
        self._blocked: set[int] = set()
        self.last_poll: Poll | None = None
        self.suspicion: str | None = None

    def restart(self) -> None:
        """Discard the last poll and the suspicion, after a pause of the supervisor."""
        self.last_poll, self.suspicion = None, None

    def scan(self, slots: Mapping[int, Slot | None], now: float) -> Finding | None:
        """Poll if it is time to, and return a deadlock that two polls have proved."""
        still = [rank for rank in slots if self._movement.still_seconds(rank, now) >= STILL_SECONDS]
        blocked = {rank for rank in still if self._records.may_be_blocked(rank, slots[rank])}
        # a single rank that waits for running ranks is not deadlocked, unless no other rank is left
        if not blocked or (len(still) < 2 and len(self._ranks.pids) > 1):
            # ranks that stay blocked keep their polling interval; a rank that joins them is polled at once
            self.restart()
            self._blocked &= blocked
            if not self._blocked:
                self._next_poll_at = 0.0
            return None
        if blocked - self._blocked:
            self._next_poll_at = 0.0  # another rank is blocked since the last poll
        if now < self._next_poll_at:
            return None
        self._blocked = blocked
        poll = self._poll(slots)
        last, self.last_poll = self.last_poll, poll
        unchanged = last is not None and (last.movement, last.recorded) == (poll.movement, poll.recorded)
        deadlock = self._prove(slots, last if unchanged else None, poll)
        self.suspicion = deadlock.sentence if deadlock is not None else None
        if deadlock is None:
            longest = max(self._movement.still_seconds(rank, now) for rank in still)
            self._next_poll_at = now + min(SLOWEST_POLL_SECONDS, max(SECOND_POLL_SECONDS, longest))
            if last is None:
                self._next_poll_at = now + SECOND_POLL_SECONDS
            return None
        if not unchanged:
            self._next_poll_at = now + SECOND_POLL_SECONDS
            return None
        moved = [at for rank in deadlock.at if (at := self._movement.moved_at(rank)) is not None]
        return Finding(deadlock=deadlock, began_at_seconds=max(moved))

    def _poll(self, slots: Mapping[int, Slot | None]) -> Poll:
        running = {rank: path for rank, path in self._ranks.sockets.items() if rank in slots}
        return Poll(
            movement=self._movement.signatures(slots),
            recorded=self._records.fetch(running),
            main_threads={rank: processes.read_main_thread(pid) for rank, pid in self._ranks.pids.items()},
        )

    def _prove(self, slots: Mapping[int, Slot | None], last: Poll | None, poll: Poll) -> Deadlock | None:
        positions = {}
        for rank, slot in slots.items():
            before = last.main_threads.get(rank) if last is not None else None
            after = poll.main_threads.get(rank)
            # a runnable thread without CPU time is not idle: other processes occupy the processor
            idle = (
                before is not None
                and after is not None
                and before.state == after.state == "S"
                and after.cpu_seconds - before.cpu_seconds <= IDLE_CPU_SECONDS
            )
            # a script past its last line does not count as exited: its threads may still join collectives
            exited = rank not in self._ranks.pids
            positions[rank] = self._records.position(
                rank, slot, poll.recorded.get(rank), exited=exited, idle=idle
            )
        return prove(positions, world_size=self._ranks.world_size)
