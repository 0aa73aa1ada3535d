"""Detection of processes that do not exit after every script has run its last line.

No rank waits for such a process, and its work may matter (an upload, a last write). It is therefore reported
only when every remaining process of the run has been inactive for a while, and much later if something lives
that it may wait for. Called by `detector.py` at every scan; observes every two seconds. Terminates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import (
    STOPPED_STATES,
    Activity,
    ExitClock,
    ExitFacts,
    all_frozen,
    hung_ranks,
    limit_seconds,
)
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.text import rank_names

CHECK_SECONDS = 2.0
CONNECTIONS_SECONDS = 10.0
"""How often the other ends of the ranks' connections are looked for, while the ranks are inactive."""
COST_FRACTION = 0.005
"""Share of one core that the observation may take; on a machine with many processes it is made less often."""


class Observe(Protocol):
    """Return the processes that remain; see `RemainingProcesses.observe`."""

    def __call__(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None: ...


class ExitHangDetector:
    """Detector of exit hangs in one attempt. `awaited` is a rank whose process the run waits for, as of the
    last check.

    Args:
        settings: `exit_seconds`, `exit_connected_seconds` and `ceiling_seconds` are the deadlines.
        observe: reads the processes.
    """

    def __init__(self, settings: DeadlineSettings, observe: Observe) -> None:
        self._settings = settings
        self._observe = observe
        self._next_check_at = self._next_connections_at = self._observed_since = 0.0
        self.restart()

    def restart(self) -> None:
        """Start the clock again, after a pause of the supervisor."""
        self.awaited: AwaitedRank | None = None
        self._exit_clock: ExitClock | None = None

    def scan(self, slots: Mapping[int, Slot], pids: Mapping[int, int], now: float) -> Stall | None:
        """Return the processes that do not exit, or None.

        Args:
            slots: all local ranks' slots; every script has run its last line.
            pids: processes that are still running, by rank.
            now: monotonic seconds.
        """
        if now < self._next_check_at or not pids:
            return None
        began = time.thread_time()
        facts = self._facts(pids, now)
        cost = time.thread_time() - began
        self._next_check_at = now + max(CHECK_SECONDS, cost / COST_FRACTION)
        if facts is None:
            self._exit_clock = self.awaited = None
            return None
        if self._exit_clock is None:
            self._exit_clock = ExitClock(self._settings, facts, now)
            self._observed_since = now
            return None
        silent = {
            rank: now - max(slot.heartbeat_seconds, self._observed_since) for rank, slot in slots.items()
        }
        self._exit_clock.record(facts, now)
        self.awaited = self._find_awaited(self._exit_clock, facts, slots, silent, now)
        return self._judge(self._exit_clock, facts, silent, now)

    def _find_awaited(
        self,
        clock: ExitClock,
        facts: ExitFacts,
        slots: Mapping[int, Slot],
        silent: Mapping[int, float],
        now: float,
    ) -> AwaitedRank | None:
        rank = next(iter(hung_ranks(facts)), None)
        if rank is None:
            return None
        slot = slots[rank]
        at_work = clock.seen in (Activity.progress, Activity.cpu)
        if facts.states[rank] in STOPPED_STATES:
            ends_at = now - silent[rank] + self._settings.frozen_limit_seconds
        elif at_work:
            ends_at = clock.progress_at + self._settings.ceiling_seconds
        else:
            ends_at = clock.inactive_since[0] + limit_seconds(facts, self._settings)
        return AwaitedRank(
            rank=rank,
            phase=Phase.idle,
            since_seconds=slot.last_progress_seconds,
            deadline_at_seconds=ends_at,
            busy=at_work,
            waiters=(),
            exiting=True,
        )

    def _facts(self, pids: Mapping[int, int], now: float) -> ExitFacts | None:
        since = self._exit_clock.inactive_since if self._exit_clock is not None else None
        # before a deadline everything is looked at once more
        due = since is not None and now - since[0] + CHECK_SECONDS >= limit_seconds(since[1], self._settings)
        connections = due or (since is not None and now >= self._next_connections_at)
        if connections:
            self._next_connections_at = now + CONNECTIONS_SECONDS
        return self._observe(pids, connections=connections)

    def _judge(
        self, clock: ExitClock, facts: ExitFacts, silent: Mapping[int, float], now: float
    ) -> Stall | None:
        ranks = hung_ranks(facts)
        if not ranks:
            return None
        if clock.seen is not Activity.progress and all_frozen(facts, silent, self._settings):
            waited, limit = min(silent[rank] for rank in ranks), self._settings.frozen_limit_seconds
            return _stall(ranks, waited, limit, "ran no Python code", (), Cause.interpreter_stuck)
        if clock.computes_for_too_long(now):
            waited, limit = now - clock.progress_at, self._settings.ceiling_seconds
            return _stall(ranks, waited, limit, "used the CPU without any input or output", ())
        if not clock.expired(facts, now):
            return None
        waited, limit = now - clock.inactive_since[0], limit_seconds(facts, self._settings)
        return _stall(ranks, waited, limit, "did nothing", facts.waits_for)


def _stall(
    ranks: tuple[int, ...],
    waited_seconds: float,
    deadline_seconds: float,
    what: str,
    alive: tuple[str, ...],
    cause: Cause = Cause.no_progress,
) -> Stall:
    while_alive = f" while {', '.join(alive)} was there to wait for" if alive else ""
    return Stall(
        cause=cause,
        culprits=ranks,
        waiters=(),
        phase=Phase.idle,
        deadline_seconds=deadline_seconds,
        waited_seconds=waited_seconds,
        sentence=f"{rank_names(ranks, capitalize=True)} did not exit after the script's last line and"
        f" {what} for {waited_seconds:.1f} s{while_alive} (deadline {deadline_seconds:.1f} s);"
        " training was complete.",
    )
