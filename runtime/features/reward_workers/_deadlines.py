"""How long one call of a reward function may take in a worker. Pure: a clock is passed in.

The limits are those of the hang detector for a rank that runs the function itself
(`watchdog.stalls.deadlines`), shortened so that the call ends first: a longest time, learned from the
function's own calls, and shorter ones for a worker that does nothing at all and for one whose interpreter is
held by one thread. `Learned` belongs to one function, `CallClock` to one call. Called by `_service.py` and
`_pool.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import (
    DeadlineSettings,
    Occurrence,
    deadline_seconds,
    quiet_deadline_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import HEARTBEAT_LATE_SECONDS
from grpo_run.watchdog.stalls.process_clocks import FrozenClock, QuietClock, ThreadReading, TreeReading

BELOW_WATCHDOG = 0.8
"""Share of the hang detector's deadline; the rest is for the end of the worker."""
LEAST_PART_SECONDS = 2.0
"""Least time for a part of a batch that has failed: a fresh worker first imports and loads the function."""
PART_FACTOR = 10.0
"""A part of a batch may take this many times the longest call of a whole batch."""
BISECTION_SECONDS = 300.0
"""Longest search for the samples that a function fails on. The other ranks wait for it."""
SLOW_FACTOR = 5.0
"""If no part of a batch returns in time, the function is slow rather than stuck: its deadline rises by this
factor, as the hang detector's does."""


class Learned:
    """How long a function's calls take.

    Args:
        settings: bounds of the hang detector.
        limit_seconds: what the user has set as the longest time of a call; None to learn it.
        earlier: durations of rewards in earlier attempts. That a deadline has ended one there does not count:
            ending a worker costs less.
    """

    def __init__(
        self, settings: DeadlineSettings, limit_seconds: float | None, earlier: Durations | None = None
    ) -> None:
        self._settings = settings
        self._earlier = replace(earlier, ended_seconds=0.0) if earlier is not None else Durations()
        self._limit_seconds = limit_seconds
        self._own = Durations()
        self.calls = 0

    @property
    def durations(self) -> Durations:
        """The calls of whole batches so far."""
        return self._earlier.then(self._own)

    @property
    def longest_seconds(self) -> float:
        """The longest call of a whole batch, the first one included."""
        durations = self.durations
        return max(durations.first_seconds, durations.longest_seconds)

    def add(self, seconds: float) -> None:
        """A call of a whole batch has returned."""
        self.calls += 1
        one = Durations.of([max(seconds, 1e-9)] if self.calls == 1 else [0.0, seconds])
        self._own = self._own.then(one)

    def note_slow(self, seconds: float) -> None:
        """A call was ended after this time, and no part of its batch returned either."""
        self._own = self._own.ended_after(seconds * SLOW_FACTOR / self._settings.factor_ended)

    def longest_call_seconds(self) -> float:
        """Return the deadline of a call of a whole batch."""
        if self._limit_seconds is not None:
            return self._limit_seconds
        occurrence = Occurrence.later if self.calls else Occurrence.first
        return BELOW_WATCHDOG * deadline_seconds(Phase.reward, self.durations, occurrence, self._settings)

    def quiet_seconds(self, *, connected: bool) -> float:
        """Return how long a worker may do nothing at all.

        Args:
            connected: it has a connection to another process.
        """
        if connected and not self.calls:
            return self.longest_call_seconds()  # nothing is known of what it may wait for
        seconds = quiet_deadline_seconds(self.durations, self._settings, connected=connected)
        return min(self.longest_call_seconds(), BELOW_WATCHDOG * seconds)

    def frozen_seconds(self) -> float:
        """Return how long a worker's interpreter may run no Python while one of its threads uses the CPU."""
        return min(self.longest_call_seconds(), BELOW_WATCHDOG * self._settings.frozen_limit_seconds)

    def part_seconds(self, left_seconds: float, levels: int, whole_seconds: float = 0.0) -> float:
        """Return the deadline of a part of a failed batch.

        Args:
            left_seconds: of the search.
            levels: how often the part can still be halved, at least 0.
            whole_seconds: after which the function itself has ended the call of the batch; 0 if it has not.
        """
        known = self.durations.observed and not self.durations.ended_seconds
        usual = PART_FACTOR * self.longest_seconds if known else left_seconds / (levels + 1)
        least = max(LEAST_PART_SECONDS, self._settings.factor_again * whole_seconds)
        return min(left_seconds, self.longest_call_seconds(), max(least, usual))


class CallClock:
    """Decides when one call has taken too long.

    Args:
        learned: of the function.
        limit_seconds: the deadline of this call.
    """

    def __init__(self, learned: Learned, limit_seconds: float) -> None:
        self._learned = learned
        self._quiet = QuietClock()
        self._frozen = FrozenClock()
        self.limit_seconds = limit_seconds
        self.look_seconds = min(2.0, learned.quiet_seconds(connected=False) / 8)
        """Time between two readings of the worker."""

    def overdue(self, elapsed_seconds: float) -> str | None:
        """Return why the call has taken too long; None if it has not.

        Args:
            elapsed_seconds: since the call began.
        """
        if elapsed_seconds >= self.limit_seconds:
            return f"did not return within {_seconds(self.limit_seconds)}"
        return None

    def quiet(self, reading: TreeReading | None, now: float) -> str | None:
        """Take a reading of the worker's processes, and return why they have done nothing for too long, or
        None.

        Args:
            reading: None if it failed.
            now: monotonic seconds.
        """
        self._quiet = self._quiet.after(reading, now)
        since = self._quiet.since_seconds
        if since is None:
            return None
        limit = self._learned.quiet_seconds(connected=self._quiet.connected is not False)
        if now - since < limit:
            return None
        return f"did nothing for {_seconds(limit)}"

    def frozen(
        self, threads: Mapping[int, ThreadReading] | None, heartbeat_age_seconds: float, now: float
    ) -> str | None:
        """Take a reading of the worker's threads, and return why it has run no Python for too long, or None.

        Args:
            threads: by id; None if they could not be read.
            heartbeat_age_seconds: since a thread of its interpreter ran last.
            now: monotonic seconds.
        """
        if heartbeat_age_seconds <= HEARTBEAT_LATE_SECONDS:
            self._frozen = FrozenClock()
            return None
        self._frozen = self._frozen.after(threads, now)
        limit = self._learned.frozen_seconds()
        if heartbeat_age_seconds < limit or not self._frozen.frozen(stopped=False):
            return None
        return f"held the interpreter for {_seconds(limit)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.3g} s"
