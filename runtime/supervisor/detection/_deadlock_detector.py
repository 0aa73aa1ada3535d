"""Deadlock detection: polls the Flight Recorders while ranks stand still, and asks for a proof.

A rank is polled only if its slot has not changed for 0.3 s and it may be in a collective. The second poll
follows after 0.1 s, later ones at growing intervals; `due_at` says when, so that scans may be rare otherwise.
If the records would prove a deadlock of ranks without other threads, the ranks are asked for their threads.
Two unchanged polls are passed to `watchdog.deadlocks.proof`. Called by `detector.py` at every scan. Does not
decide what proves a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.runtime.supervisor.detection._collective_records import CollectiveRecords, Recorded
from grpo_run.runtime.supervisor.detection._joint_records import JointRecords
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks, SlotMovement
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog import processes
from grpo_run.watchdog.deadlocks.collectives import Collective, can_meet
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position, ThreadReport, with_threads, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.observation import RankState, Slot

STILL_SECONDS = 0.3
"""A rank in a collective is polled once its slot has not changed for this long."""
SECOND_POLL_SECONDS = 0.1
SLOWEST_POLL_SECONDS = 5.0
PUT_OFF_SECONDS = 1.7
"""How long records are not read while all that the logs show is ranks that wait for a late one."""
LOOK_SECONDS = 0.5
"""Time between two looks at the main thread of a rank that computes in a backward pass."""
IDLE_CPU_SECONDS = 0.011
"""CPU time of an idle thread between two polls: one 10 ms tick is the resolution of the kernel's clock."""


@dataclass(kw_only=True)
class Poll:
    """What one poll saw.

    `movement` are the signatures of the slots, `positions` what the records say, and `threads` the reports of
    the ranks' threads, empty if they were not asked for. Two equal polls are the input of a proof: whatever
    both saw has not changed in between, on all ranks at once. `suspected`: the records would prove a deadlock
    of ranks without other threads; `deadlock` is what they prove.
    """

    movement: tuple[object, ...]
    recorded: Recorded
    main_threads: dict[int, processes.ProcessStat | None]
    positions: dict[int, Position]
    threads: dict[int, ThreadReport]
    suspected: bool = False
    deadlock: Deadlock | None = None

    def equals(self, other: Poll | None) -> bool:
        """Whether another poll saw the same."""
        return other is not None and (self.movement, self.records, self.threads) == (
            other.movement,
            other.records,
            other.threads,
        )

    @property
    def records(self) -> dict[int, object]:
        """What is compared of the positions."""
        return {rank: (position.records, position.exited) for rank, position in self.positions.items()}


class DeadlockDetector:
    """Deadlock detector of one attempt.

    `suspicion` describes a deadlock that one more poll will confirm. `due_at` is when the next poll is due if
    no slot changes, in monotonic seconds; infinite if none is.
    """

    def __init__(
        self,
        ranks: LocalRanks,
        movement: SlotMovement,
        records: CollectiveRecords,
        joint: JointRecords | None = None,
    ) -> None:
        self._ranks = ranks
        self._joint = joint
        self._movement = movement
        self._records = records
        self._next_poll_at = self._polled_at = 0.0
        self._blocked: set[int] = set()
        self._ran_at: dict[int, float] = {}
        self.last_poll: Poll | None = None
        self.suspicion: str | None = None
        self.due_at = math.inf

    def rank_exited(self) -> None:
        """Poll at once: ranks may wait for the one that has exited."""
        self._next_poll_at = 0.0

    def restart(self) -> None:
        """Discard the last poll and the suspicion: after a pause, or when a rank has moved or is only
        late.
        """
        self.last_poll, self.suspicion = None, None
        if self._joint is not None:
            self._joint.withdraw()

    def scan(self, slots: Mapping[int, Slot | None], now: float) -> HangFinding | None:
        """Poll if it is time to, and return a deadlock that two polls have proved."""
        waiting = {rank for rank, slot in slots.items() if self._may_be_blocked(rank, slot, now)}
        still = [rank for rank in slots if self._still_at(rank) <= now]
        blocked = waiting.intersection(still)
        # a single rank that waits for running ranks is not deadlocked, unless no other rank is left
        needed = min(2, len(self._ranks.pids))
        if not blocked or len(still) < needed:
            self.due_at = self._due_if_unmoved(slots, waiting, needed)
            # ranks that stay blocked keep their polling interval; a rank that joins them is polled at once
            self.restart()
            self._blocked &= blocked
            if not self._blocked:
                self._next_poll_at = 0.0
            return None
        if blocked - self._blocked:
            self._next_poll_at = 0.0  # another rank is blocked since the last poll
        put_off_until = min(self._still_at(rank) for rank in blocked) + PUT_OFF_SECONDS
        if now < put_off_until and self._some_are_late(slots, blocked):
            self.restart()
            self._next_poll_at = put_off_until
        if self._joint is not None and self._joint.is_due:
            self._next_poll_at = min(self._next_poll_at, self._polled_at + SECOND_POLL_SECONDS)
        if now < self._next_poll_at:
            joining = waiting - blocked
            self.due_at = min([self._next_poll_at, *(self._still_at(rank) for rank in joining)])
            return None
        self._blocked = blocked
        self._polled_at = now
        began_at = self._joint.time if self._joint is not None else 0
        last, poll = self.last_poll, self._poll(slots)
        self.last_poll = poll
        unchanged = poll.equals(last)
        # a proof takes longer than a poll, and most polls see what the last one saw
        same = last is not None and (poll.positions, poll.threads) == (last.positions, last.threads)
        poll.deadlock = deadlock = last.deadlock if last is not None and same else self._prove(poll)
        if deadlock is None and self._joint is not None:
            key = poll.movement, poll.records, poll.threads
            deadlock = self._joint.prove(key, _with_threads(poll), began_at)
            unchanged = True  # as long as a moment that all hosts share
        self.suspicion = deadlock.sentence if deadlock is not None else None
        if deadlock is None:
            longest = max(self._movement.still_seconds(rank, now) for rank in still)
            self._next_poll_at = now + min(SLOWEST_POLL_SECONDS, max(SECOND_POLL_SECONDS, longest))
            if last is None or (self._joint is not None and self._joint.is_due):
                self._next_poll_at = now + SECOND_POLL_SECONDS
            self.due_at = self._next_poll_at
            return None
        if not unchanged:
            self.due_at = self._next_poll_at = now + SECOND_POLL_SECONDS
            return None
        moved = [at for rank in deadlock.at if (at := self._movement.moved_at(rank)) is not None]
        return HangFinding(deadlock=deadlock, began_at_seconds=max(moved, default=now))

    def _may_be_blocked(self, rank: int, slot: Slot | None, now: float) -> bool:
        """Whether a rank waits for other ranks, or may do so in a backward pass.

        In most of these it computes: as long as its main thread runs, it waits for nobody.
        """
        if slot is None or not self._records.may_be_blocked(rank, slot):
            return False
        if rank not in self._ranks.pids or self._records.may_be_in_collective(rank, slot):
            return True
        if self._still_at(rank) > now:
            return True
        if now - self._ran_at.get(rank, -math.inf) < LOOK_SECONDS:
            return False
        if processes.read_state(self._ranks.pids[rank]) == "R":
            self._ran_at[rank] = now
            return False
        return True

    def _some_are_late(self, slots: Mapping[int, Slot | None], blocked: set[int]) -> bool:
        """Whether, according to the logs, all blocked ranks are in one collective, and the others at work.

        Every training does so in every step. The records would prove nothing, and reading them takes a tenth
        of a second of CPU time with eight ranks.
        """
        waits: list[Collective] = []
        at_work: list[tuple[int, Slot]] = []
        for rank, slot in slots.items():
            if slot is None or slot.state is not RankState.training or rank not in self._ranks.pids:
                return False
            found = self._records.current(rank, slot)
            if len(found) > 1 or (rank in blocked and not found):
                return False  # it waits with several threads, or in C++
            waits += found
            if not found:
                at_work.append((rank, slot))
        first, *others = waits
        return (
            not first.point_to_point
            and all(_is_same(first, other) for other in others)
            and not any(self._records.has_reached(rank, slot, first) for rank, slot in at_work)
        )

    def _due_if_unmoved(self, slots: Mapping[int, Slot | None], waiting: set[int], needed: int) -> float:
        """When enough ranks will have stood still, one of them in a collective; infinite if none is in
        one.
        """
        if not waiting:
            return math.inf
        still_at = sorted(self._still_at(rank) for rank in slots)
        return max(still_at[max(0, needed - 1)], min(self._still_at(rank) for rank in waiting))

    def _still_at(self, rank: int) -> float:
        """When the rank will count as standing still, if its slot does not change."""
        moved_at = self._movement.moved_at(rank)
        return math.inf if moved_at is None else moved_at + STILL_SECONDS

    def _poll(self, slots: Mapping[int, Slot | None]) -> Poll:
        running = {rank: path for rank, path in self._ranks.sockets.items() if rank in slots}
        movement = self._movement.signatures(slots)
        recorded = self._records.fetch(running)
        main_threads = {rank: processes.read_main_thread(pid) for rank, pid in self._ranks.pids.items()}
        positions = {
            rank: self._records.position(
                rank,
                slot,
                recorded.get(rank),
                # a script past its last line does not count as exited: its threads may still join collectives
                exited=rank not in self._ranks.pids,
                idle=self._is_idle(rank, main_threads.get(rank)),
            )
            for rank, slot in slots.items()
        }
        # whether those of other hosts make it a deadlock is not known here
        suspected = self._joint is not None or self._is_suspected(positions)
        return Poll(
            movement=movement,
            recorded=recorded,
            main_threads=main_threads,
            positions=positions,
            threads=self._records.fetch_threads(running) if suspected else {},
            suspected=suspected,
        )

    def _is_suspected(self, positions: dict[int, Position]) -> bool:
        if self.last_poll is not None and self.last_poll.positions == positions:
            return self.last_poll.suspected
        assumed = {rank: without_other_threads(position) for rank, position in positions.items()}
        return prove(assumed, world_size=self._ranks.world_size) is not None

    def _is_idle(self, rank: int, now: processes.ProcessStat | None) -> bool:
        """Whether the rank's main thread has slept since the last poll."""
        before = self.last_poll.main_threads.get(rank) if self.last_poll is not None else None
        # a runnable thread without CPU time is not idle: other processes occupy the processor
        return (
            before is not None
            and now is not None
            and before.state == now.state == "S"
            and now.cpu_seconds - before.cpu_seconds <= IDLE_CPU_SECONDS
        )

    def _prove(self, poll: Poll) -> Deadlock | None:
        return prove(_with_threads(poll), world_size=self._ranks.world_size)


def _with_threads(poll: Poll) -> dict[int, Position]:
    return {rank: with_threads(position, poll.threads.get(rank)) for rank, position in poll.positions.items()}


def _is_same(one: Collective, other: Collective) -> bool:
    """Whether two ranks wait for each other's part in one collective."""
    same = (one.group, one.sequence, one.point_to_point) == (
        other.group,
        other.sequence,
        other.point_to_point,
    )
    return same and can_meet(one, other)
