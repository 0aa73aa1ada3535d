"""The processes that ranks have started: adopted, waited for at the end of a finished run, and terminated.

All of them are gone before the next attempt starts and after the end of the run, except those that the user
keeps (`--keep`). After a run that has finished, a helper that still works, such as a logger's uploader, is
waited for by the rules for ranks that do not exit (`watchdog/stalls/exit_hangs.py`). Called by `agent.py`.
Which processes belong to the run is decided by `watchdog/run_processes/ownership.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from grpo_run.runtime.processes.adoption import Reaper, own_children
from grpo_run.runtime.processes.termination import TerminatedProcess, terminate, wait_for_exits
from grpo_run.watchdog.processes import ProcessStat, read_processes
from grpo_run.watchdog.run_processes.keeping import without_kept
from grpo_run.watchdog.run_processes.ownership import RunProcesses
from grpo_run.watchdog.run_processes.remaining import MAX_NAMED, RemainingProcesses, is_service
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitClock
from grpo_run.watchdog.text import duration_text

OBSERVE_SECONDS = 1.0
"""Time between two observations of helpers that are waited for."""
CONNECTIONS_SECONDS = 10.0
"""Time between two looks at what they are connected to."""
UNSEEN_SECONDS = 15.0
"""After a longer gap between two observations this process was stopped itself, and the wait begins again."""
UNNOTICED_SECONDS = 2.0
"""A longer wait is announced."""
COST_FRACTION = 0.005
"""Share of one core that remembering helpers may take while the ranks train."""
REMEMBER_SECONDS = 2.0


class Helpers:
    """The helpers of one supervisor's ranks. Every method is called in the main thread.

    Args:
        owned: tells the run's processes from others.
        remaining: observes them.
        keep: patterns of `--keep`.
        settings: deadlines of helpers that are waited for.
        announce_ranks: is told the pids of the ranks of each attempt.
        notify: shows the user one line.
        report: is told what was terminated.
        interrupted: whether the user wants the wait at the end to end.
    """

    def __init__(
        self,
        owned: RunProcesses,
        remaining: RemainingProcesses,
        *,
        keep: Sequence[str],
        settings: DeadlineSettings,
        announce_ranks: Callable[[Collection[int]], None],
        notify: Callable[[str], None],
        report: Callable[[list[TerminatedProcess]], None],
        interrupted: Callable[[], bool],
    ) -> None:
        self._owned = owned
        self._remaining = remaining
        self._keep = keep
        self._settings = settings
        self._announce_ranks = announce_ranks
        self._notify = notify
        self._report = report
        self._interrupted = interrupted
        self._ranks: set[int] = set()
        self._reaper = Reaper(lambda: own_children() | self._ranks)
        self._remember_at = 0.0

    def begin_attempt(self, ranks: Collection[int]) -> None:
        """Take note of the ranks that were just started, by pid."""
        self._ranks = set(ranks)
        self._owned.begin_attempt(ranks)
        self._announce_ranks(ranks)

    def poll(self) -> None:
        """Reap adopted helpers that have exited, and remember those whose origin will not be visible
        later.
        """
        with contextlib.suppress(OSError):  # no descriptor is left at present
            self._reaper.reap()
            now = time.monotonic()
            if not self._owned.adopts_only_ours and now >= self._remember_at:
                began = time.thread_time()
                self._owned.find(read_processes())
                cost = time.thread_time() - began
                self._remember_at = now + max(REMEMBER_SECONDS, cost / COST_FRACTION)

    def wait(self) -> None:
        """Wait for helpers of a finished run: until they have exited or are idle beyond their deadline."""
        began = now = seen_at = time.monotonic()
        clock: ExitClock | None = None
        announced = False
        connections_at = began + CONNECTIONS_SECONDS
        while not self._interrupted():
            due = clock is not None and now - clock.inactive_since[0] >= self._settings.exit_seconds
            connections = now >= connections_at or due
            if connections:
                connections_at = now + CONNECTIONS_SECONDS
            try:
                facts = self._remaining.observe({}, connections=connections)
                left = self._find()
            except OSError:
                return  # no descriptor is left: they are terminated
            if facts is None or not facts.own:
                return
            now = time.monotonic()
            seen_at, unseen_seconds = now, now - seen_at
            if clock is None or unseen_seconds > UNSEEN_SECONDS:
                clock = ExitClock(self._settings, facts, now)
            else:
                clock.record(facts, now)
                if clock.expired(facts, now) or clock.computes_for_too_long(now):
                    return
            if not announced and now - began >= UNNOTICED_SECONDS:
                announced = True
                self._announce(
                    left, time.time() + clock.inactive_since[0] + self._settings.exit_seconds - now
                )
            wait_for_exits(left, OBSERVE_SECONDS)
            self._reaper.reap()

    def terminate(self) -> None:
        """Terminate every helper that is not kept, and wait until all have exited.

        The ranks have exited. Never raises: what could not be ended is reported, once, and not waited for
        again.
        """
        try:
            terminated = terminate(self._find, sessions=self._ranks)
            self._owned.give_up([one.pid for one in terminated if one.killed and one.remains])
            self._report(terminated)
            self._reaper.reap(now=True)
        except OSError:  # no descriptor is left: the process groups of the ranks need none
            for pid in self._ranks:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
        self._ranks = set()

    def _find(self) -> Mapping[int, ProcessStat]:
        return without_kept(self._owned.find(read_processes()), self._keep)

    def _announce(self, left: Mapping[int, ProcessStat], earliest: float) -> None:
        """Say who is waited for and until when, in seconds since the epoch, at the earliest."""
        helpers = [f"{one.pid} ({one.name})" for one in left.values() if not is_service(one)]
        idle = duration_text(self._settings.exit_seconds)
        at = time.strftime("%H:%M:%S", time.localtime(earliest))
        names = ", ".join(helpers[:MAX_NAMED]) + (", …" if len(helpers) > MAX_NAMED else "")
        self._notify(
            f"every script has ended; waiting for what the ranks have started: {names}. It is ended after"
            f" being idle for {idle}, at {at} at the earliest, later while it is connected to another"
            " process; Ctrl-C ends it now, --keep leaves it running"
        )
