"""Stall detection: compares open phases with their deadlines, once per second.

The cheap check comes first: slots and /proc only. The Flight Recorders are fetched only when a phase is
overdue under the assumption that no rank waits. A stall is reported after two checks in a row found one.
Called by `detector.py` at every scan. The decision is `watchdog.stalls.stall.find_stall`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from grpo_run.runtime.supervisor.detection._activity import RankActivity
from grpo_run.runtime.supervisor.detection._collective_records import CollectiveRecords, Recorded
from grpo_run.runtime.supervisor.detection._deadlock_detector import Poll
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks, PhaseDurations, SlotMovement
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.stalls.awaited import SHORTEST_WAIT_SECONDS, AwaitedRank, find_awaited_rank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.observed import NestedPhaseTime, Observed, OpenGenerations, ProcessFacts
from grpo_run.watchdog.stalls.overdue import (
    PhaseClock,
    frozen_clock,
    has_outlasted,
    phase_clocks,
    quiet_clock,
)
from grpo_run.watchdog.stalls.stall import find_stall

CHECK_SECONDS = 1.0
CHECKS_PER_FLOOR = 8
"""Least number of checks in the shortest deadline."""
RETRY_SECONDS = 5.0
"""Pause after the Flight Recorders have cleared an overdue phase."""


class StallDetector:
    """Stall detector of one attempt. `suspicion` describes a stall that one more check will confirm.

    `awaited` is the rank that the others have been waiting for since some seconds, as of the last check.

    Args:
        now: monotonic seconds; the time before it was not observed and counts for nothing.
    """

    def __init__(
        self,
        ranks: LocalRanks,
        settings: DeadlineSettings,
        movement: SlotMovement,
        records: CollectiveRecords,
        durations: PhaseDurations,
        now: float,
    ) -> None:
        self._ranks = ranks
        self._settings = settings
        self._movement = movement
        self._records = records
        self._durations = durations
        self._observed_since = now
        self._next_check_at = 0.0
        self._check_seconds = min(CHECK_SECONDS, settings.floor_seconds / CHECKS_PER_FLOOR)
        self._activity = RankActivity(settings.floor_seconds, now)
        self._nested = NestedPhaseTime()
        self._generations = OpenGenerations()
        self._places: dict[tuple[int, float], str] = {}
        """Where ranks are that take unusually long, by rank and beginning."""
        self.suspicion: str | None = None
        self.awaited: AwaitedRank | None = None

    def restart(self, now: float) -> None:
        """Start all clocks at `now`, after a pause of the supervisor."""
        self._observed_since = now
        self._activity.restart(now)
        self.suspicion = None

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Record the slots of a scan. Cheap; called at every scan, also between two checks."""
        self._activity.record(slots, now)
        self._nested = self._nested.after(slots, now)
        self._generations = self._generations.after(slots)

    def scan(
        self, slots: Mapping[int, Slot | None], now: float, last_poll: Poll | None
    ) -> HangFinding | None:
        """Check if it is time to, and return a stall that two checks have found.

        Args:
            now: monotonic seconds.
            last_poll: the deadlock detector's last poll, which saves a fetch while the slots have not changed
                since.
        """
        if now < self._next_check_at:
            return None
        self._next_check_at = now + self._check_seconds
        still = {rank: self._movement.still_seconds(rank, now) for rank in slots}
        self.awaited = None
        if not self._may_be_late(slots, still, now):
            self.suspicion = None
            return None
        facts = self._activity.scan(slots, self._ranks.pids, still, now)
        observed = self._observe(slots, now, facts, still)
        self.awaited = self._find_awaited(observed, last_poll)
        # the first check assumes that a rank works unless it is known to wait; it fetches nothing
        assumed = self._with_records(observed, dict.fromkeys(slots, ()))
        if not self._may_be_overdue(slots, facts, now) or find_stall(assumed) is None:
            self.suspicion = None
            return None
        self._activity.look_at_connections(self._ranks.pids, now)
        # only the Flight Recorders know which ranks wait inside C++ or on a device
        sockets = {rank: path for rank, path in self._ranks.sockets.items() if rank in slots}
        fetched: Recorded | None = None
        if last_poll is None or last_poll.movement != self._movement.signatures(slots):
            fetched = self._records.fetch(sockets)
        # the connections were looked at since
        observed = self._observe(slots, now, facts, still)
        polled = last_poll.recorded if last_poll is not None else {}
        stall = find_stall(self._with_records(observed, fetched if fetched is not None else polled))
        if stall is not None and fetched is None:
            # the last poll may be outdated: work on a device continues without a change in the slot
            stall = find_stall(self._with_records(observed, self._records.fetch(sockets)))
        if stall is None:
            self.suspicion = None
            self._next_check_at = now + RETRY_SECONDS
            return None
        confirmed, self.suspicion = self.suspicion is not None, stall.sentence
        if not confirmed:
            self._next_check_at = now  # confirm at the next scan: one check may see a rank between two phases
            return None
        if not stall.stopped:
            self._durations.record_end(stall.key, stall.waited_seconds)
        return HangFinding(stall=stall, began_at_seconds=now - stall.waited_seconds)

    def overdue_at(self, slot: Slot, when: float, now: float) -> PhaseClock | None:
        """Return the clock that will be past its deadline at `when`, if the rank makes no progress until
        then.

        Args:
            slot: of the rank.
            when: monotonic seconds.
            now: the same.
        """
        slots: dict[int, Slot | None] = {slot.rank: slot}
        if not any(clock.overdue for clock in phase_clocks(slot, self._observe(slots, when))):
            return None
        self._activity.look_at_connections(self._ranks.pids, now)
        clocks = phase_clocks(slot, self._observe(slots, when))
        return next((clock for clock in clocks if clock.overdue), None)

    def _may_be_late(self, slots: Mapping[int, Slot | None], still: Mapping[int, float], now: float) -> bool:
        """Whether anything is worth reading: a still rank, a long phase, or a late heartbeat."""
        if max(still.values(), default=0.0) >= SHORTEST_WAIT_SECONDS:
            return True
        return self._activity.late_heartbeats(slots, now) or self._may_be_overdue(slots, {}, now)

    def _may_be_overdue(
        self, slots: Mapping[int, Slot | None], facts: Mapping[int, ProcessFacts | None], now: float
    ) -> bool:
        """Whether any clock can be near its deadline, which is never below half of the floor."""
        half = self._settings.floor_seconds / 2
        return now - max(_oldest_phase(slots, now), self._observed_since) >= half or any(
            one is not None and (one.frozen_seconds > 0 or one.quiet_seconds >= half)
            for one in facts.values()
        )

    def _observe(
        self,
        slots: Mapping[int, Slot | None],
        now: float,
        facts: Mapping[int, ProcessFacts | None] = MappingProxyType({}),
        still: Mapping[int, float] = MappingProxyType({}),
    ) -> Observed:
        """Return what is known at `now`, without which ranks wait."""
        learned = self._durations.current(now)
        return Observed(
            slots=slots,
            now=now,
            learned=learned.durations,
            completed=learned.completed,
            settings=self._settings,
            processes=facts,
            progress={rank: self._progressed_at(rank, slot) for rank, slot in slots.items()},
            computing={rank: self._activity.computing_at(rank) for rank in slots},
            still={rank: min(seconds, now - self._observed_since) for rank, seconds in still.items()},
            nested=self._nested,
            generations=self._generations,
            since_seconds=self._observed_since,
            exited=slots.keys() - self._ranks.pids.keys(),
            connected={rank: to for rank in slots if (to := self._connected_to(rank, now)) is not None},
            whole_world=self._ranks.are_whole_world,
        )

    def _with_records(self, observed: Observed, recorded: Recorded) -> Observed:
        """Add which ranks wait, as far as that is known from their logs and from these Flight Recorders."""
        blocked = {
            rank: self._records.is_blocked(rank, slot, recorded.get(rank))
            for rank, slot in observed.slots.items()
        }
        return replace(
            observed, waiting={rank: waits for rank, waits in blocked.items() if waits is not None}
        )

    def _find_awaited(self, observed: Observed, last_poll: Poll | None) -> AwaitedRank | None:
        # for display only, so nothing is fetched: the last poll shows who waits inside C++ if nothing has
        # moved since
        unmoved = last_poll is not None and last_poll.movement == self._movement.signatures(observed.slots)
        known = self._with_records(observed, last_poll.recorded if unmoved and last_poll is not None else {})
        awaited = find_awaited_rank(
            known,
            clock=lambda slot: self._clock(slot, known),
            busy={rank: self._activity.is_busy(rank, observed.now) for rank in observed.slots},
        )
        if awaited is None or not awaited.unusual:
            return awaited
        key = awaited.rank, awaited.since_seconds
        if key not in self._places:
            sockets = {rank: path for rank, path in self._ranks.sockets.items() if rank == awaited.rank}
            reports = self._records.fetch_threads(sockets)
            self._places = {key: reports[awaited.rank].at if awaited.rank in reports else ""}
        return replace(awaited, place=self._places[key])

    def outlasted(self, slots: Mapping[int, Slot | None], now: float) -> bool:
        """Whether a rank generates, or runs the model, for many times as long as the run ever has."""
        observed = self._observe(slots, now)
        return any(has_outlasted(slot, observed) for slot in slots.values() if slot is not None)

    def _clock(self, slot: Slot, observed: Observed) -> PhaseClock:
        """The clock of a rank's innermost phase with the nearest deadline. A rank that has just become still
        has none until somebody has looked what it does: the usual one may be an hour after a quiet rank's.
        """
        usual, busy = phase_clocks(slot, observed)[0], self._activity.is_busy(slot.rank, observed.now)
        clocks = [usual, frozen_clock(usual, observed)]
        facts, still = observed.processes.get(slot.rank), observed.still.get(slot.rank, 0.0)
        looked = facts is not None and facts.connected is not None
        if looked or (busy is not True and still >= self._settings.floor_seconds / 4):
            clocks.append(quiet_clock(usual, observed))
        elif busy is not True and still >= SHORTEST_WAIT_SECONDS:
            clocks[0] = replace(usual, deadline_at_seconds=math.inf)
        return min(
            (clock for clock in clocks if clock is not None), key=lambda clock: clock.deadline_at_seconds
        )

    def _connected_to(self, rank: int, now: float) -> str | None:
        return self._activity.connected_to(rank, self._movement.still_seconds(rank, now), now)

    def _progressed_at(self, rank: int, slot: Slot | None) -> float:
        last_work = slot.last_work_seconds if slot is not None else 0.0
        return max(self._observed_since, last_work, self._activity.active_at(rank))


def _oldest_phase(slots: Mapping[int, Slot | None], now: float) -> float:
    return min((slot.began_seconds for slot in slots.values() if slot is not None), default=now)
