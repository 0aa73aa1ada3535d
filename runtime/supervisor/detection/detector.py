"""The hang detector: scans the local ranks and reports a proved deadlock, a stuck rank or a missed deadline.

    every scan     five per second: has any slot changed? Shared memory only; more often when `due_at` says so
    deadlocks      `_deadlock_detector.py`, while ranks stand still in collectives
    waits          `_wait_detector.py`, while every rank stands still for seconds
    stalls         `_stall_detector.py`, once per second
    exit hangs     `exit_hangs.py`, once every script has run its last line

Called by the supervisor. Every decision is a pure function of what was read; this file composes the detectors
and resets them when an attempt begins. What cannot be observed is listed in `blind` and is never a reason to
act. Terminates no process and writes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.processes.host_exchange import HostExchange
from grpo_run.runtime.supervisor.detection._collective_progress import CollectiveProgressPoller, Positions
from grpo_run.runtime.supervisor.detection._collective_records import CollectiveRecords
from grpo_run.runtime.supervisor.detection._deadlock_detector import DeadlockDetector
from grpo_run.runtime.supervisor.detection._joint_records import JointRecords
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks, PhaseDurations, SlotMovement
from grpo_run.runtime.supervisor.detection._stall_detector import StallDetector
from grpo_run.runtime.supervisor.detection._wait_detector import WaitDetector
from grpo_run.runtime.supervisor.detection.exit_hangs import ExitHangDetector, Observe
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.observation import Slot, all_done
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

SUPERVISOR_PAUSE_SECONDS = 2.0
"""After a longer gap between two scans the supervisor itself was stopped, and all clocks start again."""

STANDS_SECONDS = 0.2
"""A rank that waits for less has just come to its collective."""


class HangDetector:
    """Detector of hangs on this node; one per run.

    Args:
        board: read only.
        settings: bounds of the learned deadlines.
        observe_exit: reads the processes that remain after the last line of every script.
        clock: returns monotonic seconds; must be the clock that the ranks use.
    """

    def __init__(
        self,
        board: Board,
        settings: DeadlineSettings,
        *,
        observe_exit: Observe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._observe_exit = observe_exit
        self._clock = clock
        self.phase_durations = PhaseDurations()
        self._progress = CollectiveProgressPoller(clock)
        self.begin_attempt(board, {}, {}, {}, 0)

    def begin_attempt(
        self,
        board: Board,
        local_ranks: Mapping[int, int],
        pids: Mapping[int, int],
        sockets: Mapping[int, str],
        world_size: int,
        exchange: HostExchange | None = None,
    ) -> None:
        """Discard everything observed in the last attempt.

        `local_ranks` (slot indices), `pids` and `sockets` are by rank; `exchange` is with the other hosts
        that have ranks.
        """
        now = self._clock()
        self._ranks = LocalRanks(
            board=board,
            local_ranks=dict(local_ranks),
            pids=dict(pids),
            sockets=dict(sockets),
            world_size=world_size,
        )
        self.phase_durations.begin_attempt(board, local_ranks)
        self._movement = SlotMovement()
        self._records = CollectiveRecords(self._ranks, self._clock)
        joint = JointRecords(exchange, world_size) if exchange is not None else None
        self._deadlocks = DeadlockDetector(self._ranks, self._movement, self._records, joint)
        self._stalls = StallDetector(
            self._ranks, self.settings, self._movement, self._records, self.phase_durations, now
        )
        self._waits = WaitDetector(
            self._ranks, self._movement, self._stalls.overdue_at, self.settings.exit_connected_seconds
        )
        self._exit_hangs = ExitHangDetector(self.settings, self._observe_exit)
        self._scanned_at = now

    def rank_exited(self, rank: int) -> None:
        """Stop reading the process of a rank that has exited."""
        self._ranks.remove(rank)
        self._deadlocks.rank_exited()

    def scan(self, slots: Mapping[int, Slot | None]) -> HangFinding | None:
        """Scan once. Returns a confirmed finding, or None; an unconfirmed one is in `suspicion`."""
        now = self._clock()
        if now - self._scanned_at > SUPERVISOR_PAUSE_SECONDS:
            self._movement.restart(now)
            self._deadlocks.restart()
            self._waits.restart()
            self._stalls.restart(now)
            self._exit_hangs.restart()
        self._scanned_at = now
        self._records.begin_scan()
        self._deadlocks.due_at = math.inf
        self._movement.record(slots, now)
        self._stalls.record(slots, now)
        known = {rank: slot for rank, slot in slots.items() if slot is not None}
        if all_done(list(slots.values())):
            self._deadlocks.suspicion = self._stalls.suspicion = self._stalls.awaited = None
            stuck = self._waits.scan(slots, now)
            stall = self._exit_hangs.scan(known, self._ranks.pids, now)
            # a rank that works on is not ended for the sake of one that is stuck: nobody waits for that one
            if (
                stuck is not None
                and stuck.stall is not None
                and {*self._ranks.pids} <= {*stuck.stall.culprits}
            ):
                return stuck
            if stall is None:
                return None
            return HangFinding(stall=stall, began_at_seconds=now - stall.waited_seconds)
        deadlock = self._deadlocks.scan(slots, now)
        if deadlock is not None:
            return deadlock
        stuck = self._waits.scan(slots, now)
        if stuck is not None:
            assert stuck.stall is not None
            # the deadline is certain to pass; the next attempt waits for the end, unless there is none in
            # sight
            if stuck.stall.lasts_seconds <= self.settings.ceiling_seconds:
                self.phase_durations.record_end(stuck.stall.key, stuck.stall.lasts_seconds)
            return stuck
        return self._stalls.scan(slots, now, self._deadlocks.last_poll)

    @property
    def due_at(self) -> float:
        """When the next scan is due if no slot changes, in monotonic seconds; infinite for no certain
        time.
        """
        return self._deadlocks.due_at

    @property
    def suspicion(self) -> str | None:
        """A hang that is not confirmed yet, as a sentence."""
        return self._deadlocks.suspicion or self._waits.suspicion or self._stalls.suspicion

    @property
    def awaited(self) -> AwaitedRank | None:
        """The rank that the others wait for, as of the last check; None while nobody waits for long.

        Once every script has run its last line, a rank whose process the run waits for.
        """
        return self._stalls.awaited or self._exit_hangs.awaited

    def waiting(self, slots: Mapping[int, Slot | None]) -> set[int]:
        """Return the ranks that stand still in a collective, by their logs as of the last scan."""
        still = self._movement.still_seconds
        return {r for r in self._records.waiting(slots) if still(r, self._scanned_at) >= STANDS_SECONDS}

    def outlasted(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether a rank generates, or runs the model, for many times as long as the run ever has."""
        return self._stalls.outlasted(slots, self._clock())

    @property
    def blind(self) -> dict[int, str]:
        """What could not be observed of each rank."""
        return {**self._waits.unavailable, **self._records.unavailable, **self._movement.unreadable}

    @property
    def recordings(self) -> dict[int, bytes]:
        """The Flight Recorder JSON of the last fetch, by rank."""
        return self._records.recordings

    def discard_recordings(self) -> None:
        """Drop the last fetch, which does not belong to the incident at hand."""
        self._records.recordings = {}

    def collective_logs(self) -> dict[int, object]:
        """Each rank's collective log as plain JSON values."""
        return self._records.logs_as_json()

    def collective_progress(self) -> dict[int, Positions]:
        """Return how far each rank is in its collectives, for the metrics: nothing is decided by it."""
        return self._progress.latest(self._ranks.sockets)

    def positions(self, slots: Mapping[int, Slot | None], exited: Mapping[int, bool]) -> dict[int, Position]:
        """Where every rank is in its collectives now. Used to diagnose exits."""
        running = {rank: path for rank, path in self._ranks.sockets.items() if not exited.get(rank)}
        recorded = self._records.fetch(running)
        return {
            rank: self._records.position(
                rank, slots.get(rank), recorded.get(rank), exited=exited.get(rank, False)
            )
            for rank in self._ranks.local_ranks
        }
