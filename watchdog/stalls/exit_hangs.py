"""Exit hangs: ranks whose script has run its last line, whose processes are still there and do nothing.

Waiting is not hanging while anything lives that the rank may wait for: a process that it started, in
whatever session, or one outside the job that it is connected to. Such a rank has the longer deadline. Called
by the detector of exit hangs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

QUIET_BYTES = 64 * 1024
"""I/O of an inactive process over the whole wait; a logger writes less at exit."""
QUIET_CPU_FRACTION = 0.01
"""Share of one core that the threads of an idle interpreter may use."""

STOPPED_STATES = ("T", "t")

Usages = Mapping[tuple[int, int], "ProcessUsage"]
"""By pid and start time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessUsage:
    """CPU time and I/O of one process so far; `io_bytes` does not count `send` and `recv`."""

    cpu_seconds: float
    io_bytes: int


@dataclass(frozen=True, kw_only=True)
class ExitFacts:
    """The processes that remain, at one moment.

    Args:
        states: letter of proc(5) of each remaining rank.
        own: the ranks and the processes that they started.
        waits_for: what lives that the ranks may wait for, in words.
    """

    states: Mapping[int, str]
    own: Usages
    waits_for: tuple[str, ...] = ()


class Activity(Enum):
    """What happened between two observations. The later members are more."""

    none = 0
    cpu = 1
    """The ranks' processes used the CPU, without I/O."""
    progress = 2
    """The ranks' processes did I/O, started a process, or one of them exited."""


def limit_seconds(facts: ExitFacts, settings: DeadlineSettings) -> float:
    """Return how long the ranks may be inactive."""
    if facts.waits_for:
        return max(settings.exit_seconds, settings.exit_connected_seconds)
    return settings.exit_seconds


def hung_ranks(facts: ExitFacts) -> tuple[int, ...]:
    """Return the ranks that remain; one that has exited and is not yet reaped does not."""
    return tuple(rank for rank, state in sorted(facts.states.items()) if state != "Z")


def all_frozen(facts: ExitFacts, silent_seconds: Mapping[int, float], settings: DeadlineSettings) -> bool:
    """Whether the interpreter of none of the ranks that remain has run for too long.

    Args:
        facts: the last observation.
        silent_seconds: by rank, how long ago its heartbeat was written.
        settings: bounds.
    """
    return all(
        facts.states[rank] in (*STOPPED_STATES, "R")
        and silent_seconds.get(rank, 0.0) >= settings.frozen_limit_seconds
        for rank in hung_ranks(facts)
    )


class ExitClock:
    """How long the processes that remain have been inactive. Times are seconds of one monotonic clock.

    `inactive_since` is when they were last seen active, and what was observed then; `progress_at` when they
    last made progress; `seen` what has happened since they were last active, as of the last observation.

    Args:
        settings: `exit_seconds`, `exit_connected_seconds` and `ceiling_seconds` are the deadlines.
        facts: the first observation.
        now: of that observation.
    """

    def __init__(self, settings: DeadlineSettings, facts: ExitFacts, now: float) -> None:
        self._settings = settings
        self.inactive_since = (now, facts)
        self.progress_at = now
        self.seen = Activity.none

    def record(self, facts: ExitFacts, now: float) -> None:
        """Take an observation into account."""
        before = self.inactive_since[1].own
        both = before.keys() & facts.own.keys()
        wrote = any(facts.own[key].io_bytes - before[key].io_bytes >= QUIET_BYTES for key in both)
        tolerated = QUIET_CPU_FRACTION * self._settings.exit_seconds
        if wrote or before.keys() != facts.own.keys():
            self.seen = Activity.progress
            self.progress_at = now
        elif any(facts.own[key].cpu_seconds - before[key].cpu_seconds > tolerated for key in both):
            self.seen = Activity.cpu
        else:
            self.seen = Activity.none
            return
        self.inactive_since = (now, facts)

    def computes_for_too_long(self, now: float) -> bool:
        """Return whether nothing but CPU time has been used for the longest time that is allowed."""
        return self.seen is Activity.cpu and now - self.progress_at >= self._settings.ceiling_seconds

    def expired(self, facts: ExitFacts, now: float) -> bool:
        """Return whether they have been inactive for longer than their deadline.

        Args:
            facts: the last observation: connections may have appeared since the clock started.
        """
        elapsed = now - self.inactive_since[0]
        return elapsed >= limit_seconds(facts, self._settings) and self.seen is Activity.none
