"""Detection of processes that do not exit after every script has run its last line.

No rank waits for such a process, and its work may matter (an upload, a last write). It is therefore reported
only when its whole session has been inactive for a while, and much later if it is connected to another
machine. Called by `detector.py`, twice per second. Reads /proc; terminates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.rank_names import rank_names
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import find_exit_hangs
from grpo_run.watchdog.stalls.stall import ProcessFacts, Stall

CHECK_SECONDS = 0.5


class ExitHangDetector:
    """Detector of exit hangs in one attempt.

    Args:
        settings: `exit_seconds` and `exit_connected_seconds` are the deadlines.
    """

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings
        self._next_check_at = 0.0
        self._inactive_since: tuple[float, dict[int, ProcessFacts | None]] | None = None

    def restart(self) -> None:
        """Start the clock again, after a pause of the supervisor."""
        self._inactive_since = None

    def scan(self, slots: Mapping[int, Slot | None], pids: Mapping[int, int], now: float) -> Stall | None:
        """Return the processes that do not exit, or None.

        Args:
            slots: all local ranks' slots; every script has run its last line.
            pids: processes that are still running, by rank.
            now: monotonic seconds.
        """
        if now < self._next_check_at:
            return None
        self._next_check_at = now + CHECK_SECONDS
        facts = {rank: _facts(pids.get(rank)) for rank in slots}
        if self._inactive_since is None:
            self._inactive_since = (now, facts)
        since, before = self._inactive_since
        elapsed = now - since
        quiet_seconds = max(elapsed, self._settings.exit_seconds)
        hung = find_exit_hangs(slots, before, facts, quiet_seconds, self._settings)
        if not hung:
            self._inactive_since = (now, facts)
        if not hung or elapsed < self._settings.exit_seconds:
            return None
        deadline = self._settings.exit_seconds
        if any(processes.has_remote_connection(pids[rank]) for rank in hung if rank in pids):
            # the process may wait for an answer: /proc does not count bytes on sockets
            deadline = max(deadline, self._settings.exit_connected_seconds)
        return _stall(hung, elapsed, deadline) if elapsed >= deadline else None


def _facts(pid: int | None) -> ProcessFacts | None:
    if pid is None:
        return None
    thread, usage = processes.read_main_thread(pid), processes.read_session(pid)
    if thread is None or usage is None or usage.io_bytes is None:
        return None
    return ProcessFacts(state=thread.state, cpu_seconds=usage.cpu_seconds, io_bytes=usage.io_bytes)


def _stall(ranks: tuple[int, ...], quiet_seconds: float, deadline_seconds: float) -> Stall:
    return Stall(
        cause=Cause.no_progress,
        culprits=ranks,
        waiters=(),
        phase=Phase.idle,
        deadline_seconds=deadline_seconds,
        waited_seconds=quiet_seconds,
        sentence=f"{rank_names(ranks, capitalize=True)} did not exit after the script's last line and"
        f" did nothing for {quiet_seconds:.1f} s (deadline {deadline_seconds:.1f} s); training was complete.",
    )
