"""Deadlines of phases: learned from the durations that the run has shown, within configured bounds.

For hangs that collectives cannot prove. The formula and its constants were chosen by simulation
(`benchmarks/false_alarms.py`, docs/reference/benchmarks.md). Called by `overdue.py`. Pure; measures and
terminates nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

from grpo_run.watchdog.observation import SESSION_PHASES, Phase
from grpo_run.watchdog.stalls.durations import Durations


class Occurrence(str, Enum):
    """Whether the rank has finished this phase before in this attempt; the first one fills caches."""

    first = "first"
    later = "later"


USUAL_FRACTION = 0.99
"""Quantile that represents a long but usual occurrence; rare outliers (one in a thousand) are above it."""
FLOORS_OUTSIDE = 5.0
"""With a connection to a process outside the job, a lower floor lowers the least deadline to this many
floors.
"""
ENDLESS_PHASES = frozenset({Phase.generate, Phase.forward_backward})
"""Phases of which every token, or every pass of the model, is progress, and that may go on so for ever."""
LEAST_UNUSUAL_SECONDS = 5.0
"""A shorter time is not long, however short the phase has been before."""
SMALL_SAMPLE = 20
"""Below this number of occurrences the tail is uncertain, and the margin grows with the inverse root of the
number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineSettings:
    """Bounds and margins of learned deadlines, in seconds or as factors of observed durations.

    Those that a user has set are checked where they are read (`runtime/launching/_values.py`).
    """

    floor_seconds: float = 60.0
    """Minimum for every deadline but that of a frozen interpreter. Also the deadline of a rank that does
    nothing at all while all others wait for it. A phase may wait for a sandbox, a server or a disk for most
    of a minute.
    """
    connected_seconds: float = 300.0
    """The deadline of a rank that does nothing, if it has a connection to a process outside the job, or a
    device
    open: what the other side does cannot be seen."""
    frozen_seconds: float = 20.0
    """How long an interpreter may be stopped by a signal, or use the CPU without running any Python thread. A
    third of the floor if that is longer, and the floor if that is shorter."""
    ceiling_seconds: float = 3600.0
    """Limit of the margin for outliers; a longer deadline requires durations that were observed
    (`factor_seen`)."""
    first_seconds: float = 1800.0
    """For the first occurrence of a phase without any observation, and for a rank with a connection to a
    process outside the job before the run has shown how long that takes. As long as collectives wait under
    torchrun, by transformers' default (`ddp_timeout`). A rank whose processes use the CPU is given at least
    this long, in generation, rewards and steps at least as long as one with a connection to outside.
    """
    startup_seconds: float = 3600.0
    """The same for start-up, which may download a model."""
    evaluation_seconds: float = 3600.0
    """The same for an evaluation, which may process a whole data set."""
    first_floor_seconds: float = 60.0
    """Minimum for first occurrences; the floor if that is longer."""
    exit_seconds: float = 60.0
    """After the script's last line: an inactive process is hung after this time."""
    exit_connected_seconds: float = 300.0
    """The same while something lives that the process may wait for: a process that it started, or one at the
    other end of a connection."""
    factor_seen: float = 5.0
    """Multiple of the longest observed duration."""
    factor_unseen: float = 30.0
    """Multiple of a usual long duration, for outliers that have not been observed."""
    factor_first: float = 10.0
    """Multiple of an earlier first occurrence, for another first occurrence."""
    factor_again: float = 1.5
    """Multiple of the first occurrence, for later ones: a recompilation or a reconnection takes as long
    again. For a rank that does nothing, multiple of the longest occurrence too."""
    factor_ended: float = 5.0
    """Multiple of the time after which a deadline has ended the phase. A legitimate pause of up to five times
    the floor therefore costs one recovery.
    """

    def unlearned_seconds(self, phase: Phase) -> float:
        """Return the deadline of a phase without any observation."""
        longer = {Phase.startup: self.startup_seconds, Phase.eval: self.evaluation_seconds}
        return min(longer.get(phase, self.first_seconds), self.ceiling_seconds)

    @property
    def frozen_limit_seconds(self) -> float:
        """How long one interpreter may be frozen: `frozen_seconds`, adapted to the floor."""
        return min(self.floor_seconds, max(self.frozen_seconds, self.floor_seconds / 3))

    @property
    def outside_limit_seconds(self) -> float:
        """The least deadline of a phase in which a connection to a process outside the job is open."""
        return max(self.floor_seconds, min(self.connected_seconds, FLOORS_OUTSIDE * self.floor_seconds))


def quiet_deadline_seconds(
    durations: Durations | None, settings: DeadlineSettings, *, connected: bool
) -> float:
    """Return how long a rank may do nothing at all while all other ranks wait for it, in any phase.

    Args:
        durations: observations of the rank's innermost phase; None without any.
        connected: the rank has a connection to a process outside the job, or a device open.
    """
    limit = max(settings.floor_seconds, settings.connected_seconds) if connected else settings.floor_seconds
    if durations is None:
        return limit
    shown = settings.factor_again * max(durations.longest_seconds, durations.first_seconds)
    return max(limit, shown, _after_an_end(durations, settings))


def frozen_deadline_seconds(durations: Durations | None, settings: DeadlineSettings) -> float:
    """Return how long an interpreter may be frozen, in any phase.

    The durations that the phase has shown do not count: while it ran, the heartbeat did too.

    Args:
        durations: observations of the rank's innermost phase; None without any, or if a signal has stopped
            the rank.
    """
    return max(settings.frozen_limit_seconds, _after_an_end(durations, settings))


def computing_deadline_seconds(
    phase: Phase, durations: Durations | None, occurrence: Occurrence, settings: DeadlineSettings
) -> float:
    """Return how long a rank may use the CPU in `phase` without any other sign of progress.

    In generation, rewards and steps an endless loop computes as well, so the limit is lower than in phases
    whose work may take an hour once.

    Args: as for `deadline_seconds`.
    """
    limit = deadline_seconds(phase, durations, occurrence, settings)
    longest = settings.unlearned_seconds(phase) if phase in SESSION_PHASES else settings.outside_limit_seconds
    return max(limit, longest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Forward passes of the model in an open generation, and how many of them a rollout takes at most; NaN
    without such a limit.
    """

    passes: int = 0
    limit: float = math.nan

    @property
    def end_is_near(self) -> bool:
        """Whether the generation ends by itself within the time that it has taken."""
        return self.limit / 2 <= self.passes <= self.limit


def endless_deadline_seconds(
    phase: Phase,
    durations: Durations | None,
    occurrence: Occurrence,
    settings: DeadlineSettings,
    tokens: Tokens,
) -> float:
    """Return how long `phase` may last although it makes progress all the time; infinite where nothing tells
    how long is too long.

    It is the deadline without progress, whose margin for outliers has no ceiling here, and no less than what
    is told of. A generation may pause between two tokens for a process outside the job, so it has at least
    the time of one that is connected to it, unless its tokens alone are too many; the body of a step may hold
    an evaluation, and has that of a phase without any observation.

    Args:
        tokens: of the phase so far, if it is a generation; the others as for `deadline_seconds`.
    """
    told = unusual_seconds(phase, durations, occurrence, settings)
    if math.isinf(told) or tokens.end_is_near:
        return math.inf
    least = settings.outside_limit_seconds
    if phase is not Phase.generate:
        least = settings.unlearned_seconds(phase)
    elif tokens.passes > settings.factor_unseen * tokens.limit:
        least = settings.floor_seconds
    unbounded = replace(settings, ceiling_seconds=math.inf)
    return max(told, least, deadline_seconds(phase, durations, occurrence, unbounded))


def unusual_seconds(
    phase: Phase, durations: Durations | None, occurrence: Occurrence, settings: DeadlineSettings
) -> float:
    """Return after which time a phase that makes progress is told of: `factor_unseen` times the longest."""
    if phase not in ENDLESS_PHASES or durations is None or not durations.observed:
        return math.inf
    longest = durations.longest_seconds or durations.first_seconds
    again = settings.factor_first if occurrence is Occurrence.first else settings.factor_again
    floor = settings.floor_seconds
    least = max(floor / 2, min(LEAST_UNUSUAL_SECONDS, 0.75 * floor))  # before it is ended
    return max(least, settings.factor_unseen * longest, again * durations.first_seconds)


def deadline_seconds(
    phase: Phase, durations: Durations | None, occurrence: Occurrence, settings: DeadlineSettings
) -> float:
    """Return how long a rank may be in `phase` without progress.

    A later occurrence gets max(floor, seen, min(unseen, ceiling)). `seen` is `factor_seen` times the longest
    duration or `factor_again` times the first; `unseen` is `factor_unseen` times the 99th percentile, more
    while the sample is small. As the run proceeds and outliers are observed, `seen` dominates. The ceiling
    limits only the margin for unseen outliers, so a duration that was observed is never a hang. `idle` is the
    script's own time between two `train()` calls, about which nothing can be learned: its deadline is the
    ceiling. No deadline is below `factor_ended` times what one has ended before.

    Args:
        durations: observations of the phase over all ranks and attempts; None without any.
        occurrence: whether this rank has finished the phase before in this attempt.
    """
    ended = _after_an_end(durations, settings)
    if phase is Phase.idle:
        return max(settings.ceiling_seconds, ended)
    if durations is None or not durations.observed:
        return max(settings.unlearned_seconds(phase), ended)
    return max(_learned_seconds(phase, durations, occurrence, settings), ended)


def _learned_seconds(
    phase: Phase, durations: Durations, occurrence: Occurrence, settings: DeadlineSettings
) -> float:
    later = _later_seconds(durations, settings)
    if occurrence is Occurrence.later:
        return later
    first = settings.factor_first * durations.first_seconds
    if first <= 0:  # there are counts, but the first occurrence of every attempt was lost
        first = settings.unlearned_seconds(phase)
    seen = settings.factor_again * durations.first_seconds
    floor = max(settings.first_floor_seconds, settings.floor_seconds)
    bound = max(floor, seen, min(first, settings.ceiling_seconds))
    # without later occurrences, a first one is compared with first ones only
    return max(bound, later) if durations.count else bound


def _later_seconds(durations: Durations, settings: DeadlineSettings) -> float:
    number = durations.count
    longest = durations.longest_seconds
    seen = max(settings.factor_seen * longest, settings.factor_again * durations.first_seconds)
    usual = min(durations.quantile(USUAL_FRACTION), longest)
    floor = settings.floor_seconds
    if not number:  # only first occurrences were observed: treat the longest of them as one later occurrence
        number, usual = 1, durations.first_seconds
        floor = max(settings.first_floor_seconds, settings.floor_seconds)
    unseen = settings.factor_unseen * usual * math.sqrt(max(1.0, SMALL_SAMPLE / number))
    return max(floor, seen, min(unseen, settings.ceiling_seconds))


def _after_an_end(durations: Durations | None, settings: DeadlineSettings) -> float:
    """The least deadline of a phase that a deadline has ended before; 0 if none has."""
    return settings.factor_ended * durations.ended_seconds if durations is not None else 0.0
