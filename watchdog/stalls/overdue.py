"""The clock and the deadline of each open phase of a rank.

A phase's clock pauses while another phase is open inside it: a checkpoint of one minute inside a `data`
phase of milliseconds is not a stall. Two shorter clocks run in every phase: of a rank that does nothing while
nobody works, and of one whose interpreter is frozen. Called by `stall.py`, and by
`runtime/supervisor/detection/_stall_detector.py` for the rank that others wait for.
Does not decide whether the rank is to blame. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from grpo_run.watchdog.observation import Phase, PhaseKey, Slot
from grpo_run.watchdog.stalls.deadlines import (
    LEAST_UNUSUAL_SECONDS,
    Occurrence,
    computing_deadline_seconds,
    deadline_seconds,
    endless_deadline_seconds,
    frozen_deadline_seconds,
    quiet_deadline_seconds,
    unusual_seconds,
)
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import Key, Observed

RECENT_SECONDS = 10.0
"""A rank that has computed within this time is expected to continue."""


class Rule(str, Enum):
    """Which rule sets a deadline."""

    learned = "learned"
    """No progress for longer than the durations of the phase allow."""
    connected = "connected"
    """The same while a connection to a process outside the job is open."""
    computing = "computing"
    """Nothing but CPU time for too long, in a phase in which CPU time is activity."""
    quiet = "quiet"
    """Neither CPU time nor I/O nor traffic, while all other ranks wait."""
    endless = "endless"
    """Progress all the time, but for far longer than the run has shown."""
    frozen = "frozen"
    """The interpreter is stopped, or one of its threads keeps it from running."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseClock:
    """How long a rank has been in an open phase without progress, and how long it may be.

    `deadline_at_seconds` is when the phase will be past its deadline if nothing changes, in monotonic
    seconds. `unknown_wait`: the rank has a connection to a process outside the job, and the run has yet to
    show how long what it does takes. `unusual`: it makes progress, and has taken far longer than it ever has.
    """

    rank: int
    phase: Phase
    callback: str = ""
    since_seconds: float
    silent_seconds: float
    deadline_seconds: float
    occurrence: Occurrence
    deadline_at_seconds: float
    rule: Rule = Rule.learned
    unknown_wait: bool = False
    unusual: bool = False

    @property
    def overdue(self) -> bool:
        """Whether the phase is past its deadline."""
        return self.silent_seconds > self.deadline_seconds

    @property
    def key(self) -> PhaseKey:
        """What the durations of this phase are learned by."""
        return self.callback if self.phase is Phase.callback else self.phase


def phase_clocks(slot: Slot, observed: Observed) -> list[PhaseClock]:
    """Return the clocks of a rank's open phases, the innermost first."""
    settings = observed.settings
    progressed_at = observed.progress.get(slot.rank, 0.0)
    computing_at = observed.computing.get(slot.rank, 0.0)
    connected = slot.rank in observed.connected
    # a first reward function that returns at once says nothing about the next one: only the end of the outer
    # phase does
    unknown = connected and not all(
        observed.learned.get(one.key, Durations()).observed for one in slot.open_phases
    )
    clocks = []
    for key, began, until, durations, occurrence in _open_phases(slot, observed):
        here = key[2]
        since = max(here.since_seconds, progressed_at)
        limit = deadline_seconds(here.phase, durations, occurrence, settings)
        silent = until - since - _inner_seconds(key, since, observed)
        rule = Rule.learned
        outside = settings.unlearned_seconds(here.phase) if unknown else settings.outside_limit_seconds
        if connected and limit < outside:
            rule, limit = Rule.connected, outside
        deadline_at = until + limit - silent
        if computing_at > since:
            # CPU time restarts the clock of the usual deadline, but not that of a longer one
            inner = _inner_seconds(key, computing_at, observed)
            idle = max(0.0, until - computing_at - inner)
            longer = computing_deadline_seconds(here.phase, durations, occurrence, settings)
            longer = longer if idle < RECENT_SECONDS else max(longer, limit)
            ends_at = until + longer - silent
            if silent > longer or idle < RECENT_SECONDS:
                rule, limit, deadline_at = Rule.computing, longer, ends_at
            else:
                silent, deadline_at = idle, min(ends_at, until + limit - idle)
                since = computing_at
        clock = PhaseClock(
            rank=slot.rank,
            phase=here.phase,
            callback=here.callback,
            since_seconds=since,
            silent_seconds=silent,
            deadline_seconds=limit,
            occurrence=occurrence,
            deadline_at_seconds=deadline_at,
            rule=rule,
            unknown_wait=unknown,
        )
        if progressed_at > began and not clock.overdue:
            clock = _endless_clock(clock, began + _inner_seconds(key, began, observed), until, slot, observed)
        clocks.append(clock)
    return clocks


def has_outlasted(slot: Slot, observed: Observed) -> bool:
    """Whether a rank is in a phase that may be endless and has taken many times as long as it ever has, with
    or without progress. The floor of deadlines does not count.
    """
    settings = replace(observed.settings, floor_seconds=0.0)
    return any(
        until - began - _inner_seconds(key, began, observed)
        > max(LEAST_UNUSUAL_SECONDS, unusual_seconds(key[2].phase, durations, occurrence, settings))
        for key, began, until, durations, occurrence in _open_phases(slot, observed)
    )


def _open_phases(
    slot: Slot, observed: Observed
) -> Iterator[tuple[Key, float, float, Durations | None, Occurrence]]:
    """Yield a rank's open phases, the innermost first.

    Each with its beginning as far as it was observed, the beginning of the next inner one or now, what is
    learned of it, and whether it is the rank's first one.
    """
    completed, until = observed.completed.get(slot.rank, ()), observed.now
    for depth, here in reversed(list(enumerate(slot.open_phases))):
        occurrence = Occurrence.later if here.key in completed else Occurrence.first
        began = max(here.since_seconds, observed.since_seconds)
        yield (slot.rank, depth, here), began, until, observed.learned.get(here.key), occurrence
        until = here.since_seconds


def _endless_clock(
    usual: PhaseClock, since: float, until: float, slot: Slot, observed: Observed
) -> PhaseClock:
    """Return the clock of all the time of a phase that makes progress, if that is unusually long; the usual
    one if that ends sooner and progress has ceased.
    """
    took = until - since
    durations = observed.learned.get(usual.key)
    known = (usual.phase, durations, usual.occurrence, observed.settings)
    if took <= unusual_seconds(*known):
        return usual
    limit = endless_deadline_seconds(*known, observed.generations.tokens(slot))
    ends_at = observed.now + limit - took
    if observed.now - usual.since_seconds > RECENT_SECONDS and usual.deadline_at_seconds < ends_at:
        return usual
    return replace(
        usual,
        since_seconds=since,
        silent_seconds=took,
        deadline_seconds=limit,
        deadline_at_seconds=ends_at,
        rule=Rule.endless,
        unusual=True,
    )


def frozen_clock(innermost: PhaseClock, observed: Observed) -> PhaseClock | None:
    """Return the clock of a rank whose interpreter is frozen; None if it runs, or if that is unknown.

    Args:
        innermost: the clock of the rank's innermost phase.
        observed: of this check.
    """
    facts = observed.processes.get(innermost.rank)
    if facts is None or not facts.frozen_seconds:
        return None
    durations = None if facts.stopped else observed.learned.get(innermost.key)
    limit = frozen_deadline_seconds(durations, observed.settings)
    return replace(
        innermost,
        silent_seconds=facts.frozen_seconds,
        deadline_seconds=limit,
        deadline_at_seconds=observed.now + limit - facts.frozen_seconds,
        rule=Rule.frozen,
    )


def quiet_clock(innermost: PhaseClock, observed: Observed) -> PhaseClock | None:
    """Return the clock of a rank that does nothing while nobody works; None if somebody does, or may, and for
    a wait of which nothing is known.

    Args: as for `frozen_clock`.
    """
    facts, nobody_works = observed.processes.get(innermost.rank), observed.nobody_works_seconds
    if facts is None or not nobody_works or innermost.unknown_wait:
        return None
    durations = observed.learned.get(innermost.key)
    limit = quiet_deadline_seconds(durations, observed.settings, connected=facts.connected is not False)
    return replace(
        innermost,
        silent_seconds=nobody_works,
        deadline_seconds=limit,
        deadline_at_seconds=observed.now + limit - nobody_works,
        rule=Rule.quiet,
    )


def _inner_seconds(key: Key, since: float, observed: Observed) -> float:
    """How much of the time since `since` belongs to finished inner phases.

    Of each kind of phase, at most its own deadline; nothing if the clock has restarted after the last one.
    """
    nested, learned = observed.nested, observed.learned
    if since >= nested.ended_at.get(key, -1.0):
        return 0.0
    return sum(
        min(
            seconds,
            deadline_seconds(_phase_of(inner), learned.get(inner), Occurrence.first, observed.settings),
        )
        for inner, seconds in nested.spent[key].items()
    )


def _phase_of(key: PhaseKey) -> Phase:
    return key if isinstance(key, Phase) else Phase.callback
