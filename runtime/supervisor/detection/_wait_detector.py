"""Detection of stuck ranks: looks at the threads of ranks that stand still, and asks for a proof.

A rank is suspected if every local rank has stood still for 3 s, and if it is not blocked in a collective and
its main thread sleeps without a short time limit. Only then are threads read: three looks within 3 s, or more
over 20 s if the proof depends on a stopped process. As long as a look proves nothing, the interval grows to
5 s. Called by `detector.py` at every scan. Does not decide what proves that a rank is stuck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_run.runtime.board import collective_log
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks, SlotMovement
from grpo_run.runtime.supervisor.detection._wait_looks import LookReader
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog import processes
from grpo_run.watchdog.observation import RankState, Slot
from grpo_run.watchdog.stalls.observed import HEARTBEAT_LATE_SECONDS
from grpo_run.watchdog.stalls.overdue import PhaseClock
from grpo_run.watchdog.stalls.stall import Stall, cause_of
from grpo_run.watchdog.waits.looks import RankLook
from grpo_run.watchdog.waits.proof import StuckRank, prove_stuck
from grpo_run.watchdog.waits.sentences import describe_stuck

STILL_SECONDS = 3.0
"""A rank is suspected once no local rank's slot has changed for this long."""
CONFIRM_SECONDS = 1.5
"""Interval between looks that agree."""
CONFIRMED_SECONDS = 3.0
"""Time from the first look to the last one of a proof."""
STOPPED_SECONDS = 20.0
"""The same if the proof depends on a stopped process, which a debugger or a scheduler may continue."""
SLOWEST_LOOK_SECONDS = 4.5
"""Interval between looks that prove nothing."""
ASLEEP_LOOK_SECONDS = 8.0
"""The same while nothing in any suspected rank is due before a known time."""

OverdueAt = Callable[[Slot, float, float], "PhaseClock | None"]
"""The phase of a rank that will have missed its deadline at a time without progress, as of now (monotonic
seconds).
"""


@dataclass(kw_only=True)
class _Suspect:
    """What was seen of one rank: the first of several looks that agree, and how many they are."""

    first: RankLook
    first_at: float
    looks: int = 1
    stuck: StuckRank | None = None


class WaitDetector:
    """Detector of stuck ranks in one attempt. `suspicion` describes a rank that more looks will confirm.

    Args:
        ranks: of this node.
        movement: when each slot last changed.
        overdue_at: applies the deadlines.
        exit_seconds: how long a rank that has run its last line may do nothing, whatever it may wait for.
    """

    def __init__(
        self, ranks: LocalRanks, movement: SlotMovement, overdue_at: OverdueAt, exit_seconds: float
    ) -> None:
        self._ranks = ranks
        self._movement = movement
        self._overdue_at = overdue_at
        self._exit_seconds = exit_seconds
        self._reader = LookReader()
        self.restart()

    @property
    def unavailable(self) -> dict[int, str]:
        """By rank, why the kernel does not show what its threads wait for."""
        return {rank: f"no wait states of its threads: {why}" for rank, why in self._reader.refused.items()}

    def restart(self) -> None:
        """Discard all looks, after a pause of the supervisor or after a rank has moved."""
        self._suspects: dict[int, _Suspect] = {}
        self._reader.forget()
        self._promising = False
        self._interval = CONFIRM_SECONDS
        self._next_look_at = 0.0
        self.suspicion: str | None = None

    def scan(self, slots: Mapping[int, Slot | None], now: float) -> HangFinding | None:
        """Look if it is time to, and return ranks that are proved stuck."""
        if any(self._movement.still_seconds(rank, now) < STILL_SECONDS for rank in slots):
            if self._next_look_at:
                self.restart()
            return None
        if now < self._next_look_at:
            return None
        complete = self._promising  # a proof may be near: nothing of the last look is used again
        if complete:
            self._reader.forget()
        suspected = self._suspected(slots, now)
        self._promising = bool(suspected) and self._look(suspected, now)
        self._suspects = {rank: found for rank, found in self._suspects.items() if rank in suspected}
        self._next_look_at = now + self._next_interval(suspected, now)
        seen = {rank: found.stuck for rank, found in self._suspects.items() if found.stuck is not None}
        stuck = {rank: found for rank, found in seen.items() if self._is_certain(suspected[rank], found, now)}
        exiting = all(suspected[rank].has_returned for rank in stuck)
        sentence = describe_stuck(stuck, now=now, exiting=exiting) if stuck else None
        self.suspicion = sentence
        if sentence is None or not any(self._is_confirmed(self._suspects[rank], now) for rank in stuck):
            return None
        if not complete:
            self._next_look_at = now
            return None
        return self._finding(suspected, stuck, sentence, now)

    def _next_interval(self, suspected: Mapping[int, Slot], now: float) -> float:
        """When to look again: soon if a proof is near, late if nothing is due in any rank before a known
        time.
        """
        if self._promising:
            self._interval = CONFIRM_SECONDS
            return self._interval
        self._interval = min(SLOWEST_LOOK_SECONDS, 2 * self._interval)
        asleep = [found.stuck for found in self._suspects.values()]
        if not suspected or len(asleep) < len(suspected):
            return self._interval
        ends = [found.until_seconds for found in asleep if found is not None]
        if len(ends) < len(asleep):
            return self._interval
        return max(CONFIRM_SECONDS, min(ASLEEP_LOOK_SECONDS, min(ends) - now))

    def _suspected(self, slots: Mapping[int, Slot | None], now: float) -> dict[int, Slot]:
        """The ranks worth a look; none while any rank runs."""
        found = {}
        for rank, slot in slots.items():
            pid = self._ranks.pids.get(rank)
            if slot is None:
                return {}
            if pid is None:
                continue  # it has exited
            log = self._ranks.board.copy_log(self._ranks.local_ranks[rank])
            waits = collective_log.may_be_in_collective(log, slot.collectives_issued)
            # a wait for a device uses the CPU
            if not waits and processes.read_state(pid) not in ("S", "T"):
                return {}
            # without a fresh heartbeat the rank may be frozen, and its list of idle threads outdated
            fresh = now - slot.heartbeat_seconds <= HEARTBEAT_LATE_SECONDS
            blocked = collective_log.is_blocked(log)
            if fresh and not blocked and self._reader.main_thread_may_be_stuck(pid):
                found[rank] = slot
        return found

    def _look(self, suspected: Mapping[int, Slot], now: float) -> bool:
        """Look at these ranks. Returns whether the next look may prove that one of them is stuck."""
        looks = self._reader.read(
            {rank: self._ranks.pids[rank] for rank in suspected},
            {rank: (slot.heartbeat_thread, *slot.idle_threads) for rank, slot in suspected.items()},
        )
        promising = False
        for rank, look in looks.items():
            suspect = self._suspects.get(rank)
            stuck = prove_stuck(suspect.first, look) if suspect is not None else None
            if suspect is None or stuck is None:
                self._suspects[rank] = _Suspect(first=look, first_at=now)
                promising |= prove_stuck(look, look) is not None
                continue
            suspect.looks += 1
            suspect.stuck = stuck
            promising |= self._is_certain(suspected[rank], stuck, now)
        return promising

    def _is_certain(self, slot: Slot, stuck: StuckRank, now: float) -> bool:
        """Whether the rank is stuck for ever, or known to miss the deadline of its phase."""
        if math.isinf(stuck.until_seconds):
            return True
        if slot.state is RankState.done:
            return stuck.until_seconds - now > self._exit_seconds
        return self._overdue_at(slot, stuck.until_seconds, now) is not None

    def _is_confirmed(self, suspect: _Suspect, now: float) -> bool:
        assert suspect.stuck is not None
        needed = STOPPED_SECONDS if suspect.stuck.by_stop else CONFIRMED_SECONDS
        return suspect.looks >= 3 and now - suspect.first_at >= needed - 0.01

    def _finding(
        self, slots: Mapping[int, Slot], stuck: Mapping[int, StuckRank], sentence: str, now: float
    ) -> HangFinding:
        began = {rank: self._movement.moved_at(rank) or now for rank in stuck}
        first = min(stuck, key=lambda rank: (began[rank], rank))
        slot, until = slots[first], stuck[first].until_seconds
        missed = self._overdue_at(slot, until, now) if math.isfinite(until) else None
        here = missed or slot.open_phases[-1]
        return HangFinding(
            stall=Stall(
                cause=cause_of(here.phase),
                culprits=(first, *(rank for rank in sorted(stuck) if rank != first)),
                waiters=tuple(rank for rank in sorted(self._ranks.pids) if rank not in stuck),
                phase=here.phase,
                callback=here.callback,
                deadline_seconds=missed.deadline_seconds if missed is not None else 0.0,
                waited_seconds=now - began[first],
                lasts_seconds=until - (missed.since_seconds if missed is not None else began[first]),
                sentence=sentence,
                confidence="proved",
            ),
            began_at_seconds=began[first],
        )
