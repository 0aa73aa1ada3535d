"""Processes that are still there after every script has run its last line: leaving, or hung.

Nobody waits for them any more, and what they do may matter: an upload, a last write. So one is called hung only when
its whole session has done nothing for a while, and for a long while when it is connected to another machine. Called
by the watch twice a second. Reads /proc; ends nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.detection import ProcessFacts, Stall, hung_at_exit

LOOK_SECONDS = 0.5


class Leftovers:
    """One an attempt."""

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings
        self._look_at = 0.0
        self._quiet: tuple[float, dict[int, ProcessFacts | None]] | None = None

    def forget(self) -> None:
        """Begin anew: nobody looked for a while."""
        self._quiet = None

    def look(self, slots: Mapping[int, Slot | None], pids: Mapping[int, int], now: float) -> Stall | None:
        """The processes that hang, if any.

        Args:
            pids: of the ranks that still live.
            now: monotonic seconds.
        """
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_SECONDS
        facts = {rank: _facts(pids.get(rank)) for rank in slots}
        if self._quiet is None:
            self._quiet = (now, facts)
        since, before = self._quiet
        elapsed = now - since
        quiet = hung_at_exit(slots, before, facts, max(elapsed, self._settings.exit_seconds), self._settings)
        if not quiet:
            self._quiet = (now, facts)
        if not quiet or elapsed < self._settings.exit_seconds:
            return None
        deadline = self._settings.exit_seconds
        if any(processes.connected_elsewhere(pids[rank]) for rank in quiet if rank in pids):
            # it may wait for an answer: the kernel does not count what sockets carry
            deadline = max(deadline, self._settings.exit_connected_seconds)
        return _stall(quiet, elapsed, deadline) if elapsed >= deadline else None


def _facts(pid: int | None) -> ProcessFacts | None:
    if pid is None:
        return None
    thread, usage = processes.read_main_thread(pid), processes.read_session(pid)
    if thread is None or usage is None or usage.io_bytes is None:
        return None
    return ProcessFacts(state=thread.state, cpu_seconds=usage.cpu_seconds, io_bytes=usage.io_bytes)


def _stall(ranks: tuple[int, ...], quiet_seconds: float, deadline_seconds: float) -> Stall:
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
    return Stall(
        cause=Cause.no_progress,
        culprits=ranks,
        waiters=(),
        phase=Phase.idle,
        deadline_seconds=deadline_seconds,
        waited_seconds=quiet_seconds,
        sentence=f"{who} did not leave after the script's last line and did nothing for {quiet_seconds:.1f} s"
        f" (deadline {deadline_seconds:.1f} s); the work was done.",
    )
