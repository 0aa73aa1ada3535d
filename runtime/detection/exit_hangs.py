"""Detection of processes that do not exit after every script has run its last line.

No rank waits for such a process, and its work may matter (an upload, a last write). It is therefore reported
only when every remaining process of the run has been inactive for a while, and much later if something lives
that it may wait for. Called by `detector.py` at every scan; observes every two seconds. Terminates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.rank_names import rank_names
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import (
    STOPPED_STATES,
    Activity,
    ExitFacts,
    activity,
    frozen_limit_seconds,
    frozen_ranks,
    hung_ranks,
    limit_seconds,
)
from grpo_run.watchdog.stalls.stall import Stall

CHECK_SECONDS = 2.0
CONNECTIONS_SECONDS = 10.0
"""How often the other ends of the ranks' connections are looked for, while the ranks are inactive."""
COST_FRACTION = 0.005
"""Share of one core that the observation may take; on a machine with many processes it is made less often."""


class Observe(Protocol):
    """Return the processes that remain; see `RemainingProcesses.observe`."""

    def __call__(
        self, pids: Mapping[int, int], sockets: Mapping[int, str], *, connections: bool
    ) -> ExitFacts | None: ...


class ExitHangDetector:
    """Detector of exit hangs in one attempt. `awaited` is a rank whose process the run waits for, as of the last check.

    Args:
        settings: `exit_seconds`, `exit_connected_seconds` and `ceiling_seconds` are the deadlines.
        observe: reads the processes; replaced in tests.
        cost_clock: measures what an observation costs, in seconds.
    """

    def __init__(
        self,
        settings: DeadlineSettings,
        *,
        observe: Observe | None = None,
        cost_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._settings = settings
        self._observe = RemainingProcesses().observe if observe is None else observe
        self._cost_clock = cost_clock
        self._next_check_at = self._next_connections_at = 0.0
        self.restart()

    def restart(self) -> None:
        """Start the clock again, after a pause of the supervisor."""
        self.awaited: AwaitedRank | None = None
        self._inactive_since: tuple[float, ExitFacts] | None = None
        self._own_active_at = self._progress_at = self._observed_since = 0.0

    def scan(
        self,
        slots: Mapping[int, Slot | None],
        pids: Mapping[int, int],
        sockets: Mapping[int, str],
        now: float,
    ) -> Stall | None:
        """Return the processes that do not exit, or None.

        Args:
            slots: all local ranks' slots.
            pids: processes that are still running, by rank.
            sockets: paths of their worker servers.
            now: monotonic seconds.
        """
        done = all(slot is not None and slot.state is RankState.done for slot in slots.values())
        if now < self._next_check_at or not pids or not done:
            return None
        began = self._cost_clock()
        facts = self._facts(pids, sockets, now)
        cost = self._cost_clock() - began
        self._next_check_at = now + max(CHECK_SECONDS, cost / COST_FRACTION)
        if facts is None:
            self._inactive_since = self.awaited = None
            return None
        if self._inactive_since is None:
            self._inactive_since = (now, facts)
            self._own_active_at = self._progress_at = self._observed_since = now
            return None
        silent = {
            rank: now - max(slot.heartbeat_seconds, self._observed_since)
            for rank, slot in slots.items()
            if slot is not None
        }
        stall, seen = self._judge(facts, silent, now)
        self.awaited = self._find_awaited(facts, slots, silent, seen, now)
        return stall

    def _find_awaited(
        self,
        facts: ExitFacts,
        slots: Mapping[int, Slot | None],
        silent: Mapping[int, float],
        seen: Activity,
        now: float,
    ) -> AwaitedRank | None:
        assert self._inactive_since is not None
        rank = next(iter(hung_ranks(facts)), None)
        slot = slots[rank] if rank is not None else None
        if slot is None:
            return None
        at_work = seen in (Activity.progress, Activity.cpu)
        if facts.states[slot.rank] in STOPPED_STATES:
            limit = frozen_limit_seconds(facts, self._settings, local_ranks=len(silent))
            ends_at = now - silent[slot.rank] + limit
        elif at_work:
            ends_at = self._progress_at + self._settings.ceiling_seconds
        else:
            ends_at = self._inactive_since[0] + limit_seconds(facts, self._settings)
        return AwaitedRank(
            rank=slot.rank,
            phase=Phase.idle,
            since_seconds=slot.last_progress_seconds,
            deadline_at_seconds=ends_at,
            busy=at_work,
            waiters=(),
            exiting=True,
        )

    def _facts(self, pids: Mapping[int, int], sockets: Mapping[int, str], now: float) -> ExitFacts | None:
        since = self._inactive_since
        # before a deadline everything is looked at once more
        due = since is not None and now - since[0] + CHECK_SECONDS >= limit_seconds(since[1], self._settings)
        connections = due or (since is not None and now >= self._next_connections_at)
        if connections:
            self._next_connections_at = now + CONNECTIONS_SECONDS
        return self._observe(pids, sockets, connections=connections)

    def _judge(
        self, facts: ExitFacts, silent: Mapping[int, float], now: float
    ) -> tuple[Stall | None, Activity]:
        assert self._inactive_since is not None
        _, before = self._inactive_since
        ceiling = self._settings.ceiling_seconds
        seen = activity(before, facts, self._settings.exit_seconds)
        if seen is Activity.progress:
            self._progress_at = now
        if seen in (Activity.progress, Activity.cpu):
            self._own_active_at = now
        if seen is not Activity.none and now - self._own_active_at < ceiling:
            self._inactive_since = (now, facts)
        ranks = hung_ranks(facts)
        if not ranks:
            return None, seen
        if seen is not Activity.progress and frozen_ranks(
            facts, silent, self._settings, local_ranks=len(silent)
        ):
            waited = min(silent[rank] for rank in ranks)
            what = "ran no Python code"
            limit = self._settings.frozen_limit_seconds
            return _stall(ranks, waited, limit, what, (), Cause.interpreter_stuck), seen
        if now - self._progress_at >= ceiling and seen is Activity.cpu:
            what = "used the CPU without any input or output"
            return _stall(ranks, now - self._progress_at, ceiling, what, ()), seen
        limit = limit_seconds(facts, self._settings)
        # the connections may have appeared since the clock started
        elapsed = now - self._inactive_since[0]
        if elapsed < limit or (seen is not Activity.none and now - self._own_active_at < ceiling):
            return None, seen
        return _stall(ranks, elapsed, limit, "did nothing", facts.waits_for), seen


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
