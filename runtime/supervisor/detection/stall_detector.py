"""Stall detection: compares open phases with their deadlines, once per second.

The cheap check comes first: slots and /proc only. The Flight Recorders are fetched only when a phase is
overdue under the assumption that no rank waits. A stall is reported after two checks in a row found one.
Called by `detector.py` at every scan. The decision is `watchdog.stalls.detection.find_stall`.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.runtime.supervisor.detection.activity import RankActivity
from grpo_run.runtime.supervisor.detection.collective_records import CollectiveRecords, Recorded
from grpo_run.runtime.supervisor.detection.deadlock_detector import Poll
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.runtime.supervisor.detection.local_ranks import LocalRanks
from grpo_run.runtime.supervisor.detection.phase_durations import PhaseDurations
from grpo_run.runtime.supervisor.detection.slot_movement import SlotMovement
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.stalls.awaited import SHORTEST_WAIT_SECONDS, AwaitedRank, find_awaited_rank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.detection import find_stall, frozen_clock, nobody_works_seconds, quiet_clock
from grpo_run.watchdog.stalls.overdue import NestedPhaseTime, PhaseClock, phase_clocks
from grpo_run.watchdog.stalls.stall import ProcessFacts, Stall

CHECK_SECONDS = 1.0
CHECKS_PER_FLOOR = 8
"""Least number of checks in the shortest deadline."""
RETRY_SECONDS = 5.0
"""Pause after the Flight Recorders have cleared an overdue phase."""
SUSPENDED_AFTER_SECONDS = 1.0
"""Ranks that are all stopped for longer than this are suspended: their clocks start again when they continue."""


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
        self.suspicion: str | None = None
        self.awaited: AwaitedRank | None = None
        self._stopped_since: float | None = None

    @property
    def suspended_since(self) -> float | None:
        """Since when every rank has been stopped; None for the only one, which may have stopped itself."""
        return self._stopped_since if len(self._ranks.pids) > 1 else None

    def restart(self, now: float) -> None:
        """Start all clocks at `now`, after a pause of the supervisor or of all ranks."""
        self._observed_since = now
        self._activity.restart(now)
        self.suspicion = self._stopped_since = None

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Record the slots of a scan. Cheap; called at every scan, also between two checks."""
        self._activity.record(slots, now)
        self._nested = self._nested.after(slots, now)

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
        self._note_suspension(slots, facts, now)
        self.awaited = self._find_awaited(slots, still, facts, last_poll, now)
        # the first check assumes that a rank works unless it is known to wait; it fetches nothing
        if not self._may_be_overdue(slots, facts, now) or self._find(slots, now, facts, still, None) is None:
            self.suspicion = None
            return None
        self._activity.look_at_connections(self._ranks.pids, now)
        # only the Flight Recorders know which ranks wait inside C++ or on a device
        sockets = {rank: path for rank, path in self._ranks.sockets.items() if rank in slots}
        fetched: Recorded | None = None
        if last_poll is None or last_poll.movement != self._movement.signatures(slots):
            fetched = self._records.fetch(sockets)
        stall = self._find(slots, now, facts, still, fetched if fetched is not None else _recorded(last_poll))
        if stall is not None and fetched is None:
            # the last poll may be outdated: work on a device continues without a change in the slot
            stall = self._find(slots, now, facts, still, self._records.fetch(sockets))
        if stall is None:
            self.suspicion = None
            self._next_check_at = now + RETRY_SECONDS
            return None
        confirmed, self.suspicion = self.suspicion is not None, stall.sentence
        if not confirmed:
            self._next_check_at = now  # confirm at the next scan: one check may see a rank between two phases
            return None
        self._durations.record_end(stall.key, stall.waited_seconds)
        return HangFinding(stall=stall, began_at_seconds=now - stall.waited_seconds)

    def overdue_at(self, slot: Slot, when: float, now: float) -> PhaseClock | None:
        """Return the clock that will be past its deadline at `when`, if the rank makes no progress until then.

        Args:
            slot: of the rank.
            when: monotonic seconds.
            now: the same.
        """
        if not any(clock.overdue for clock in self._clocks(slot, when)):
            return None
        self._activity.look_at_connections(self._ranks.pids, now)
        return next((clock for clock in self._clocks(slot, when) if clock.overdue), None)

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

    def _note_suspension(
        self, slots: Mapping[int, Slot | None], facts: Mapping[int, ProcessFacts | None], now: float
    ) -> None:
        """Start all clocks again when ranks continue that were all stopped at once, as after a preemption."""
        running = [facts.get(rank) for rank in slots if rank in self._ranks.pids]
        if running and all(one is not None and one.stopped for one in running):
            if self._stopped_since is None:
                self._stopped_since = now
        elif self._stopped_since is not None:
            if now - self._stopped_since >= SUSPENDED_AFTER_SECONDS:
                self.restart(now)
            self._stopped_since = None

    def _find(
        self,
        slots: Mapping[int, Slot | None],
        now: float,
        facts: Mapping[int, ProcessFacts | None],
        still: Mapping[int, float],
        recorded: Recorded | None,
    ) -> Stall | None:
        """Apply `find_stall`.

        With `recorded` None, every rank counts as working unless it is known to wait.
        """
        learned = self._durations.current(now)
        blocked = {
            rank: self._records.is_blocked(rank, slot, recorded.get(rank) if recorded is not None else ())
            for rank, slot in slots.items()
        }
        return find_stall(
            slots,
            now=now,
            learned=learned.durations,
            completed=learned.completed,
            settings=self._settings,
            processes=facts,
            progress={rank: self._progressed_at(rank, slots.get(rank)) for rank in slots},
            computing={rank: self._activity.computing_at(rank) for rank in slots},
            waiting={rank: waits for rank, waits in blocked.items() if waits is not None},
            still={rank: min(seconds, now - self._observed_since) for rank, seconds in still.items()},
            nested=self._nested,
            exited=self._exited(slots),
            connected={rank for rank in slots if self._is_connected(rank, now)},
            whole_world=self._ranks.are_whole_world,
        )

    def _find_awaited(
        self,
        slots: Mapping[int, Slot | None],
        still: Mapping[int, float],
        facts: Mapping[int, ProcessFacts | None],
        last_poll: Poll | None,
        now: float,
    ) -> AwaitedRank | None:
        if max(still.values(), default=0.0) < SHORTEST_WAIT_SECONDS:
            return None
        # for display only, so nothing is fetched: the last poll shows who waits inside C++ if nothing has moved since
        unmoved = last_poll is not None and last_poll.movement == self._movement.signatures(slots)
        recorded = _recorded(last_poll) if unmoved else None
        waiting = {
            rank: self._records.is_blocked(rank, slot, recorded.get(rank) if recorded is not None else None)
            for rank, slot in slots.items()
        }
        known = {rank: waits for rank, waits in waiting.items() if waits is not None}
        nobody_works = nobody_works_seconds(slots, facts, known, still, self._exited(slots))
        return find_awaited_rank(
            slots,
            waiting=waiting,
            still=still,
            clock=lambda slot: self._clock(slot, facts.get(slot.rank), nobody_works, now),
            busy={rank: self._activity.is_busy(rank, now) for rank in slots},
            asking={rank for rank in slots if self._activity.asks_job(rank)},
        )

    def _clock(self, slot: Slot, facts: ProcessFacts | None, nobody_works: float, now: float) -> PhaseClock:
        """The clock of a rank's innermost phase with the nearest deadline."""
        usual = self._clocks(slot, now)[0]
        durations = self._durations.current(now).durations.get(usual.key)
        suspended = self.suspended_since is not None
        frozen = frozen_clock(usual, facts, durations, self._settings, suspended=suspended, now=now)
        if suspended and frozen is not None:
            return frozen  # no other deadline runs
        clocks = [usual, frozen]
        # a rank of another node may be at work, and the connections may not be known yet
        if self._ranks.are_whole_world and facts is not None and facts.connected is not None:
            clocks.append(quiet_clock(usual, facts, durations, self._settings, nobody_works, now))
        return min(
            (clock for clock in clocks if clock is not None), key=lambda clock: clock.deadline_at_seconds
        )

    def _clocks(self, slot: Slot, now: float) -> list[PhaseClock]:
        """The clocks of a rank's open phases, the innermost first."""
        learned = self._durations.current(now)
        return phase_clocks(
            slot,
            now=now,
            learned=learned.durations,
            completed=learned.completed.get(slot.rank, ()),
            settings=self._settings,
            progressed_at=self._progressed_at(slot.rank, slot),
            computing_at=self._activity.computing_at(slot.rank),
            nested=self._nested,
            connected=self._is_connected(slot.rank, now),
        )

    def _is_connected(self, rank: int, now: float) -> bool:
        return self._activity.is_connected(rank, self._movement.still_seconds(rank, now), now)

    def _exited(self, slots: Mapping[int, Slot | None]) -> set[int]:
        return slots.keys() - self._ranks.pids.keys()

    def _progressed_at(self, rank: int, slot: Slot | None) -> float:
        last_work = slot.last_work_seconds if slot is not None else 0.0
        return max(self._observed_since, last_work, self._activity.active_at(rank))


def _oldest_phase(slots: Mapping[int, Slot | None], now: float) -> float:
    return min((slot.began_seconds for slot in slots.values() if slot is not None), default=now)


def _recorded(poll: Poll | None) -> Recorded | None:
    return poll.recorded if poll is not None else None
